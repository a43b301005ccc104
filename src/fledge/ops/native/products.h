// y = W x for a few rows x at once, over weights that lie in memory as few bits as they have.
//
// A matrix [N, K] is pieces of rows. A packed piece is blocks of four rows, and a unit is what a
// block has of 32 columns:
//
//   FOUR   64 bytes: nibble 2r+h of word l is row r, column 16h+l; w = step q + least
//   EIGHT  128 bytes: row after row, 32 signed bytes each; w = step q
//   BRAIN  256 bytes: row after row, 32 bfloat16 each
//
// Steps are halves or floats (and for EIGHT they may be finer, one for each 16 columns). Weights
// come out as exactly the floats they were packed from.
//
// Up to FEW rows of x, weights are unpacked in registers and used at once. For more rows the four
// rows are unpacked into memory that stays near, and multiplied from there.
#pragma once

#include "simd.h"

enum Format : int32_t {
    FLOATS = 0,
    FOUR_HALF = 1,
    FOUR_FLOAT = 2,
    EIGHT_HALF = 3,
    EIGHT_FINE = 4,
    BRAIN = 5
};

struct Piece {
    int32_t format;
    int32_t num_rows;
    const void* codes;
    const void* steps;
};

struct Matrix {
    const Piece* pieces;
    const float* bias;
    int32_t num_pieces;
    int32_t num_rows;
    int32_t num_columns;
    int32_t unused;
};

constexpr int BLOCK = 4;
constexpr int UNIT = 32;
constexpr int HALF_UNIT = UNIT / 2;
constexpr int VECTORS = UNIT / LANES;  // of a row of a unit
constexpr int FEW = HAS_WIDE ? 8 : 6;
constexpr int MOST_AT_ONCE = HAS_WIDE ? 6 : 3;
constexpr int NEAR_BLOCKS = 2;
constexpr int NEAR_COLUMNS = 768;
constexpr int MOST_ROWS = 96;
constexpr int AHEAD_BYTES = 4096;
constexpr int SLICE = 128;

// What one thread needs beside the factors.
struct Near {
    alignas(64) float panel[NEAR_BLOCKS * BLOCK * NEAR_COLUMNS];
    alignas(64) V sums[NEAR_BLOCKS][MOST_ROWS * BLOCK];
    alignas(64) float slice[MOST_ROWS * SLICE];
};

constexpr int NEAR_UNITS = NEAR_COLUMNS / UNIT;

template <bool IS_HALF> struct FourBits {
    static constexpr int CODE_BYTES = 64;
    static constexpr int NUM_STEPS = 8;
    static constexpr bool HAS_HALVES = IS_HALF;

#if HAS_WIDE
    static constexpr int NUM_NEAR = NUM_STEPS;

    // Vector v of row r.
    INLINE V part(const uint8_t* codes, const float* steps, int r, int v) {
        const V count = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
        VI packed;
        memcpy(&packed, codes, 64);
        return look_up(packed >> (8 * r + 4 * v), count * steps[r] + steps[4 + r]);
    }
#else
    // Codes are used where they stand in their words, which makes them larger by a power of two, and
    // steps smaller by the same: four for the lower codes, four least values, four for the upper codes.
    static constexpr int NUM_NEAR = 12;

    INLINE void spread(V steps, float* near) {
        const V lower = {1.0f, 0x1p-8f, 0x1p-16f, 0x1p-24f, 1.0f, 1.0f, 1.0f, 1.0f};
        const V4 upper = {0x1p-4f, 0x1p-12f, 0x1p-20f, 1.0f};
        store(near, steps * lower);
        *(UnalignedV4*)(near + 8) = __builtin_shufflevector(steps, steps, 0, 1, 2, 3) * upper;
    }

    INLINE V part(const uint8_t* codes, const float* near, int r, int v) {
        typedef uint32_t Words __attribute__((vector_size(4 * LANES)));
        int half = v / 2, shift = 8 * r + 4 * half;
        Words packed;
        memcpy(&packed, codes + v % 2 * sizeof(packed), sizeof(packed));
        // The highest code stands where the sign would be.
        Words code = shift == 28 ? packed >> 28 : packed & (15u << shift);
        return __builtin_convertvector((VI)code, V) * near[8 * half + r] + near[4 + r];
    }
#endif
};

template <bool IS_FINE> struct EightBits {
    static constexpr int CODE_BYTES = 128;
    static constexpr int PER_ROW = IS_FINE ? 2 : 1;
    static constexpr int NUM_STEPS = BLOCK * PER_ROW;
    static constexpr int NUM_NEAR = NUM_STEPS;
    static constexpr bool HAS_HALVES = !IS_FINE;

    INLINE V part(const uint8_t* codes, const float* steps, int r, int v) {
        return bytes_to_floats(codes + 32 * r + v * LANES) *
               steps[PER_ROW * r + v * PER_ROW / VECTORS];
    }
};

struct Brains {
    static constexpr int CODE_BYTES = 256;
    static constexpr int NUM_STEPS = 0;
    static constexpr int NUM_NEAR = 0;
    static constexpr bool HAS_HALVES = false;

    INLINE V part(const uint8_t* codes, const float*, int r, int v) {
        return brains_to_floats(codes + 64 * r + 2 * v * LANES);
    }
};

template <int FORMAT> struct Kind;
template <> struct Kind<FOUR_HALF> : FourBits<true> {};
template <> struct Kind<FOUR_FLOAT> : FourBits<false> {};
template <> struct Kind<EIGHT_HALF> : EightBits<false> {};
template <> struct Kind<EIGHT_FINE> : EightBits<true> {};
template <> struct Kind<BRAIN> : Brains {};

template <int FORMAT> struct Unit : Kind<FORMAT> {
    typedef Kind<FORMAT> K;
    static constexpr int STEP_BYTES = K::NUM_STEPS * (K::HAS_HALVES ? 2 : 4);

    // Steps of up to NEAR_UNITS units as floats, where a load can spread each over all lanes.
    INLINE const float* steps(const uint8_t* packed, int64_t num_units, float* room) {
        if constexpr (K::NUM_NEAR == K::NUM_STEPS) {
            if (!K::HAS_HALVES) return (const float*)packed;
            halves_to_floats((const uint16_t*)packed, int(num_units) * K::NUM_STEPS, room);
        } else {
            for (int64_t u = 0; u < num_units; u++) {
                float own[K::NUM_STEPS];
                const uint8_t* from = packed + u * STEP_BYTES;
                if (K::HAS_HALVES) halves_to_floats((const uint16_t*)from, K::NUM_STEPS, own);
                else memcpy(own, from, sizeof(own));
                K::spread(load(own), room + u * K::NUM_NEAR);
            }
        }
        return room;
    }
};

// Where a result goes: four columns of row t, fewer at the end of a piece.
struct Sink {
    float* y;
    int64_t stride;
    int count;
    INLINE void put_at(float* to, V4 sums, int count) {
        if (count == 4) *(UnalignedV4*)to = sums;
        else
            for (int i = 0; i < count; i++) to[i] = sums[i];
    }
    inline __attribute__((always_inline)) void put(int t, V4 sums) const {
        put_at(y + t * stride, sums, count);
    }
    // The sums of T rows; `at` gives what there is of one of the four outputs of a row.
    template <int T, typename At>
    inline __attribute__((always_inline)) void put_all(At at) const {
#if HAS_WIDE
        constexpr int FOURS = T / 4 * 4;
        auto quarters = [&](int t) { return quarter_sums(at(0, t), at(1, t), at(2, t), at(3, t)); };
#pragma GCC unroll 4
        for (int t = 0; t < FOURS; t += 4) {
            V sums = fold_quarters(quarters(t), quarters(t + 1), quarters(t + 2), quarters(t + 3));
            put(t, __builtin_shufflevector(sums, sums, 0, 1, 2, 3));
            put(t + 1, __builtin_shufflevector(sums, sums, 4, 5, 6, 7));
            put(t + 2, __builtin_shufflevector(sums, sums, 8, 9, 10, 11));
            put(t + 3, __builtin_shufflevector(sums, sums, 12, 13, 14, 15));
        }
#else
        constexpr int FOURS = 0;
#endif
#pragma GCC unroll 8
        for (int t = FOURS; t < T; t++) put(t, fold4(at(0, t), at(1, t), at(2, t), at(3, t)));
    }
};

// What will be read soon. The processor guesses that too, but never beyond a page.
template <int NUM_BYTES> INLINE void ask_for(const uint8_t* codes) {
#pragma GCC unroll 8
    for (int line = 0; line < NUM_BYTES; line += 64)
        __builtin_prefetch(codes + AHEAD_BYTES + line, 0, 3);
}

// The steps of as many units further on as their codes are.
template <typename U> INLINE void ask_for_steps(const uint8_t* steps, int64_t num_units) {
    constexpr int64_t AHEAD = int64_t(AHEAD_BYTES) / U::CODE_BYTES * U::STEP_BYTES;
    for (int64_t at = 0; at < num_units * U::STEP_BYTES; at += 64)
        __builtin_prefetch(steps + AHEAD + at, 0, 3);
}

// How many of the four rows have their sums in registers at once.
constexpr int rows_at_once(int num_factors) {
    if (HAS_WIDE) return num_factors <= 4 ? 4 : 2;
    return num_factors <= 2 ? 4 : 2;
}

#if HAS_WIDE
// Some rows of one unit times T rows of x.
template <typename U, int T, int FIRST, int COUNT>
INLINE void sum_unit(const uint8_t* codes, const float* near, const float* x, int64_t x_stride,
                     V (&sums)[COUNT][T]) {
    V low[COUNT], high[COUNT];
#pragma GCC unroll 8
    for (int r = 0; r < COUNT; r++) {
        low[r] = U::part(codes, near, FIRST + r, 0);
        high[r] = U::part(codes, near, FIRST + r, 1);
    }
#pragma GCC unroll 16
    for (int t = 0; t < T; t++) {
        V one = load(x + t * x_stride);
        V other = load(x + t * x_stride + LANES);
#pragma GCC unroll 8
        for (int r = 0; r < COUNT; r++) {
            sums[r][t] += low[r] * one;
            sums[r][t] += high[r] * other;
        }
    }
}
#else
// The same with sixteen registers, which is what AVX2 has.
template <typename U, int T, int FIRST, int COUNT>
INLINE void sum_unit(const uint8_t* codes, const float* near, const float* x, int64_t x_stride,
                     V (&sums)[COUNT][T]) {
    if constexpr (T <= 2) {
#pragma GCC unroll 8
        for (int r = 0; r < COUNT; r++)
#pragma GCC unroll 4
            for (int v = 0; v < VECTORS; v++) {
                V w = U::part(codes, near, FIRST + r, v);
#pragma GCC unroll 2
                for (int t = 0; t < T; t++) sums[r][t] += w * load(x + t * x_stride + v * LANES);
            }
        return;
    }
#pragma GCC unroll 4
    for (int v = 0; v < VECTORS; v++) {
        // Steps are loaded again rather than kept at the cost of sums.
        if (T > 4 || v % 2 == 0) asm("" : "+r"(near));
        V w[COUNT];
#pragma GCC unroll 8
        for (int r = 0; r < COUNT; r++) w[r] = U::part(codes, near, FIRST + r, v);
#pragma GCC unroll 8
        for (int t = 0; t < T; t++) {
            V one = held(load(x + t * x_stride + v * LANES));
#pragma GCC unroll 8
            for (int r = 0; r < COUNT; r++) sums[r][t] += w[r] * one;
        }
    }
}
#endif

// Rows of a packed block, from the first one on, times T rows of x, unpacked on the way.
template <typename U, int T, int FIRST>
INLINE void sum_rows(const uint8_t* codes, const float* near, int64_t num_units, const float* x,
                     int64_t x_stride, V (&sums)[BLOCK][T]) {
    constexpr int COUNT = rows_at_once(T);
    V own[COUNT][T];
    memcpy(own, sums[FIRST], sizeof(own));
    for (int64_t u = 0; u < num_units; u++) {
        if (FIRST == 0) ask_for<U::CODE_BYTES>(codes + u * U::CODE_BYTES);
        sum_unit<U, T, FIRST>(codes + u * U::CODE_BYTES, near + u * U::NUM_NEAR, x + u * UNIT,
                              x_stride, own);
    }
    memcpy(sums[FIRST], own, sizeof(own));
    if constexpr (FIRST + COUNT < BLOCK)
        sum_rows<U, T, FIRST + COUNT>(codes, near, num_units, x, x_stride, sums);
}

template <int FORMAT, int T>
static void few_rows(const uint8_t* codes, const uint8_t* steps, int64_t num_units, const float* x,
                     int64_t x_stride, const Sink& sink) {
    typedef Unit<FORMAT> U;
    float room[NEAR_UNITS * U::NUM_NEAR + 1];
    V sums[BLOCK][T] = {};
    for (int64_t begin = 0; begin < num_units; begin += NEAR_UNITS) {
        int64_t count = num_units - begin < NEAR_UNITS ? num_units - begin : NEAR_UNITS;
        const uint8_t* packed = steps + begin * U::STEP_BYTES;
        const float* near = U::steps(packed, count, room);
        ask_for_steps<U>(packed, count);
        sum_rows<U, T, 0>(codes + begin * U::CODE_BYTES, near, count, x + begin * UNIT, x_stride,
                          sums);
    }
    sink.template put_all<T>([&](int r, int t) { return sums[r][t]; });
}

// Four rows of floats times T rows of x. Where these are not all columns, `kept` has the sums.
template <int T, bool IS_WHOLE>
static void tile(const float* const* w, const float* x, int64_t x_stride, int64_t columns, V* kept,
                 const Sink& sink) {
    V sums[BLOCK][T];
#pragma GCC unroll 8
    for (int r = 0; r < BLOCK; r++)
#pragma GCC unroll 8
        for (int t = 0; t < T; t++) sums[r][t] = IS_WHOLE ? V{} : kept[t * BLOCK + r];
    const float *w0 = w[0], *w1 = w[1], *w2 = w[2], *w3 = w[3];
    int64_t k = 0;
    for (; k + LANES <= columns; k += LANES) {
#if HAS_WIDE
        V r0 = load(w0 + k), r1 = load(w1 + k), r2 = load(w2 + k), r3 = load(w3 + k);
#pragma GCC unroll 8
        for (int t = 0; t < T; t++) {
            V one = load(x + t * x_stride + k);
            sums[0][t] += r0 * one;
            sums[1][t] += r1 * one;
            sums[2][t] += r2 * one;
            sums[3][t] += r3 * one;
        }
#else
        V ones[T];
#pragma GCC unroll 8
        for (int t = 0; t < T; t++) ones[t] = held(load(x + t * x_stride + k));
#pragma GCC unroll 4
        for (int r = 0; r < BLOCK; r++) {
            V own = held(load((r < 2 ? r == 0 ? w0 : w1 : r == 2 ? w2 : w3) + k));
#pragma GCC unroll 8
            for (int t = 0; t < T; t++) sums[r][t] += own * ones[t];
        }
#endif
    }
    if (k < columns) {
        int64_t rest = columns - k;
        V r0 = load_some(w0 + k, rest), r1 = load_some(w1 + k, rest), r2 = load_some(w2 + k, rest),
          r3 = load_some(w3 + k, rest);
#pragma GCC unroll 8
        for (int t = 0; t < T; t++) {
            V one = load_some(x + t * x_stride + k, rest);
            sums[0][t] += r0 * one;
            sums[1][t] += r1 * one;
            sums[2][t] += r2 * one;
            sums[3][t] += r3 * one;
        }
    }
    if (IS_WHOLE) return sink.template put_all<T>([&](int r, int t) { return sums[r][t]; });
#pragma GCC unroll 8
    for (int t = 0; t < T; t++)
#pragma GCC unroll 8
        for (int r = 0; r < BLOCK; r++) kept[t * BLOCK + r] = sums[r][t];
}

// Where the results of some blocks go, from the first of them on.
struct Blocks {
    int count;
    int64_t num_rows;  // of the piece, from the first block on
    float* y;
    int64_t y_stride;

    inline __attribute__((always_inline)) Sink sink(int block, int first = 0) const {
        int64_t left = num_rows - block * BLOCK;
        return {y + block * BLOCK + first * y_stride, y_stride, int(left < BLOCK ? left : BLOCK)};
    }
};

template <int T>
INLINE void tile_blocks(const float* const* w, const float* x, int64_t x_stride, int64_t columns,
                        Near& near, const Blocks& blocks, int first, bool is_whole) {
    for (int block = 0; block < blocks.count; block++, w += BLOCK) {
        V* kept = near.sums[block] + first * BLOCK;
        Sink sink = blocks.sink(block, first);
        if (is_whole) tile<T, true>(w, x, x_stride, columns, kept, sink);
        else tile<T, false>(w, x, x_stride, columns, kept, sink);
    }
}

// Rows of floats, block by block, times all rows of x, of which a few at a time stay near.
static void tiles(const float* const* w, const float* x, int64_t x_stride, int num_rows,
                  int64_t columns, Near& near, const Blocks& blocks, bool is_whole) {
    int num_parts = (num_rows + MOST_AT_ONCE - 1) / MOST_AT_ONCE;
    for (int part = 0, begin = 0; part < num_parts; part++) {
        int end = num_rows * (part + 1) / num_parts;
        const float* from = x + begin * x_stride;
#define TILES(T)                                                                                 \
    case T:                                                                                      \
        tile_blocks<T <= MOST_AT_ONCE ? T : 1>(w, from, x_stride, columns, near, blocks, begin, \
                                               is_whole);                                        \
        break;
        switch (end - begin) {
            TILES(1)
            TILES(2)
            TILES(3)
            TILES(4)
            TILES(5)
            TILES(6)
        }
#undef TILES
        begin = end;
    }
}

template <int FORMAT>
static void unpack(const uint8_t* codes, const uint8_t* steps, int64_t num_units, float* panel) {
    typedef Unit<FORMAT> U;
    float room[NEAR_UNITS * U::NUM_NEAR + 1];
    const float* near = U::steps(steps, num_units, room);
    for (int64_t u = 0; u < num_units; u++, near += U::NUM_NEAR) {
        ask_for<U::CODE_BYTES>(codes + u * U::CODE_BYTES);
#pragma GCC unroll 8
        for (int r = 0; r < BLOCK; r++)
#pragma GCC unroll 4
            for (int v = 0; v < VECTORS; v++)
                store(panel + r * NEAR_COLUMNS + u * UNIT + v * LANES,
                      U::part(codes + u * U::CODE_BYTES, near, r, v));
    }
}

// Sums over some of the columns at a time: `prepare` says where rows of floats are for them.
template <typename Prepare>
static void by_columns(int64_t num_columns, const float* x, int64_t x_stride, int num_rows,
                       Near& near, const Blocks& blocks, Prepare prepare) {
    bool is_whole = num_columns <= NEAR_COLUMNS;
    const float* rows[NEAR_BLOCKS * BLOCK];
    if (!is_whole)
        for (int block = 0; block < blocks.count; block++)
            memset(near.sums[block], 0, sizeof(V) * size_t(num_rows) * BLOCK);
    for (int64_t k = 0; k < num_columns; k += NEAR_COLUMNS) {
        int64_t columns = num_columns - k < NEAR_COLUMNS ? num_columns - k : NEAR_COLUMNS;
        prepare(k, columns, rows);
        tiles(rows, x + k, x_stride, num_rows, columns, near, blocks, is_whole);
    }
    if (is_whole) return;
    for (int block = 0; block < blocks.count; block++) {
        const V* sums = near.sums[block];
        Sink sink = blocks.sink(block);
        for (int t = 0; t < num_rows; t++, sums += BLOCK)
            sink.put(t, fold4(sums[0], sums[1], sums[2], sums[3]));
    }
}

template <int FORMAT>
static void many_rows(const uint8_t* codes, const uint8_t* steps, int64_t num_columns,
                      const float* x, int64_t x_stride, int num_rows, Near& near,
                      const Blocks& blocks) {
    typedef Unit<FORMAT> U;
    by_columns(num_columns, x, x_stride, num_rows, near, blocks,
               [&](int64_t k, int64_t columns, const float** rows) {
                   for (int block = 0; block < blocks.count; block++) {
                       int64_t unit = block * (num_columns / UNIT) + k / UNIT;
                       unpack<FORMAT>(codes + unit * U::CODE_BYTES, steps + unit * U::STEP_BYTES,
                                      columns / UNIT, near.panel + block * BLOCK * NEAR_COLUMNS);
                   }
                   for (int r = 0; r < NEAR_BLOCKS * BLOCK; r++)
                       rows[r] = near.panel + r * NEAR_COLUMNS;
               });
}

static void float_rows(const float* w, int64_t num_columns, const float* x, int64_t x_stride,
                       int num_rows, Near& near, const Blocks& blocks) {
    by_columns(num_columns, x, x_stride, num_rows, near, blocks,
               [&](int64_t k, int64_t, const float** rows) {
                   for (int r = 0; r < NEAR_BLOCKS * BLOCK; r++) {
                       int64_t there = r < blocks.num_rows ? r : blocks.num_rows - 1;
                       rows[r] = w + there * num_columns + k;
                   }
               });
}

template <int FORMAT>
static void packed_rows(const uint8_t* codes, const uint8_t* steps, int64_t num_columns,
                        const float* x, int64_t x_stride, int num_rows, Near& near,
                        const Blocks& blocks) {
    typedef Unit<FORMAT> U;
    int64_t units = num_columns / UNIT;
    // Formats that are rarer take rows by fours, so that they are compiled sooner.
    constexpr bool IS_USUAL = FORMAT == FOUR_HALF || FORMAT == EIGHT_HALF;
    if (num_rows > FEW)
        return many_rows<FORMAT>(codes, steps, num_columns, x, x_stride, num_rows, near, blocks);
    if (!IS_USUAL && num_rows > 4) {
        Blocks rest = blocks;
        rest.y += 4 * rest.y_stride;
        packed_rows<FORMAT>(codes, steps, num_columns, x, x_stride, 4, near, blocks);
        return packed_rows<FORMAT>(codes, steps, num_columns, x + 4 * x_stride, x_stride,
                                   num_rows - 4, near, rest);
    }
    for (int block = 0; block < blocks.count; block++) {
        Sink sink = blocks.sink(block);
#define FEW_ROWS(T)                                                                      \
    case T:                                                                              \
        few_rows<IS_USUAL || T <= 4 ? FORMAT : FOUR_HALF, T <= FEW ? T : 1>(             \
            codes, steps, units, x, x_stride, sink);                                     \
        break;
        switch (num_rows) {
            FEW_ROWS(1)
            FEW_ROWS(2)
            FEW_ROWS(3)
            FEW_ROWS(4)
            FEW_ROWS(5)
            FEW_ROWS(6)
            FEW_ROWS(7)
            FEW_ROWS(8)
        }
#undef FEW_ROWS
        codes += units * U::CODE_BYTES;
        steps += units * U::STEP_BYTES;
    }
}

struct Share {
    int64_t begin, end;
};

INLINE Share share_of(int64_t count, int64_t part, int64_t num_parts) {
    return {count * part / num_parts, count * (part + 1) / num_parts};
}

template <int FORMAT>
static void packed_blocks(const Piece& piece, int64_t first, int64_t num_columns, const float* x,
                          int64_t x_stride, int num_rows, Near& near, const Blocks& blocks) {
    typedef Unit<FORMAT> U;
    int64_t unit = first * (num_columns / UNIT);
    packed_rows<FORMAT>((const uint8_t*)piece.codes + unit * U::CODE_BYTES,
                        (const uint8_t*)piece.steps + unit * U::STEP_BYTES, num_columns, x,
                        x_stride, num_rows, near, blocks);
}

// Some blocks of the outputs of a piece, for at most MOST_ROWS rows of x.
static void piece_rows(const Piece& piece, int64_t num_columns, const float* x, int64_t x_stride,
                       int num_rows, float* y, int64_t y_stride, Share share, Near& near) {
    for (int64_t first = share.begin; first < share.end; first += NEAR_BLOCKS) {
        int64_t left = share.end - first;
        Blocks blocks = {int(left < NEAR_BLOCKS ? left : NEAR_BLOCKS),
                         piece.num_rows - first * BLOCK, y + first * BLOCK, y_stride};
#define PACKED(FORMAT)                                                                        \
    case FORMAT:                                                                              \
        packed_blocks<FORMAT>(piece, first, num_columns, x, x_stride, num_rows, near, blocks); \
        break;
        switch (piece.format) {
            PACKED(FOUR_HALF)
            PACKED(FOUR_FLOAT)
            PACKED(EIGHT_HALF)
            PACKED(EIGHT_FINE)
            PACKED(BRAIN)
            default:
                float_rows((const float*)piece.codes + first * BLOCK * num_columns, num_columns, x,
                           x_stride, num_rows, near, blocks);
        }
#undef PACKED
    }
}

INLINE int64_t blocks_of(const Piece& piece) { return (piece.num_rows + BLOCK - 1) / BLOCK; }

// Some blocks of one piece of x W^T + b, whose outputs begin at `column`.
static void multiply_piece(const Matrix& matrix, const Piece& piece, int64_t column, const float* x,
                           int64_t x_stride, int64_t num_rows, float* y, int64_t y_stride,
                           Share blocks, Near& near) {
    for (int64_t t = 0; t < num_rows; t += MOST_ROWS) {
        int rows = int(num_rows - t < MOST_ROWS ? num_rows - t : MOST_ROWS);
        piece_rows(piece, matrix.num_columns, x + t * x_stride, x_stride, rows,
                   y + t * y_stride + column, y_stride, blocks, near);
    }
    if (matrix.bias == nullptr) return;
    int64_t end = blocks.end * BLOCK < piece.num_rows ? blocks.end * BLOCK : piece.num_rows;
    for (int64_t t = 0; t < num_rows; t++)
        for (int64_t n = blocks.begin * BLOCK; n < end; n++)
            y[t * y_stride + column + n] += matrix.bias[column + n];
}

// One part of so many of x W^T + b: a share of every piece.
static void multiply(const Matrix& matrix, const float* x, int64_t x_stride, int64_t num_rows,
                     float* y, int64_t y_stride, int64_t part, int64_t num_parts, Near& near) {
    int64_t column = 0;
    for (int p = 0; p < matrix.num_pieces; p++) {
        const Piece& piece = matrix.pieces[p];
        multiply_piece(matrix, piece, column, x, x_stride, num_rows, y, y_stride,
                       share_of(blocks_of(piece), part, num_parts), near);
        column += piece.num_rows;
    }
}
