// Packed products with sixteen registers of eight floats: lanes are rows.
//
// A block is eight rows, and a unit is what it has of 32 columns:
//
//   FOUR   128 bytes: nibble i of word 8j+r is row r, column 8j+i; w = step q + least
//   EIGHT  256 bytes: column after column, 8 signed bytes each; w = step q
//   BRAIN  512 bytes: column after column, 8 bfloat16 each
//
// Steps of the eight rows lie side by side. Of four blocks that follow each other each unit lies beside
// those of the others, so that memory is read from one end to the other. A step is the same for all columns of a unit, so codes are
// summed up first and their sum is multiplied with the step: what a weight costs is two or three
// operations to make its code a float, and one for each row of x.
#pragma once

#include "tiles.h"

constexpr int WORD_COLUMNS = 8;
constexpr int BESIDE = 4;  // blocks whose units lie side by side
constexpr int AHEAD_UNITS = 8;
constexpr int MOST_FACTORS = 6;  // rows of x at once

INLINE V load_halves(const uint8_t* halves) {
    float floats[LANES];
    halves_to_floats((const uint16_t*)halves, LANES, floats);
    return load(floats);
}

template <bool IS_HALF> struct FourBits {
    static constexpr int CODE_BYTES = 128;
    static constexpr int STEP_BYTES = 2 * LANES * (IS_HALF ? 2 : 4);
    static constexpr int GROUPS = 1;
    static constexpr bool HAS_LEAST = true;

    // Column i of some eight.
    INLINE V column(const uint8_t* codes, int i) {
        typedef uint32_t Words __attribute__((vector_size(4 * LANES)));
        Words code;
        memcpy(&code, codes, sizeof(code));
        code >>= 4 * i;
        if (i < WORD_COLUMNS - 1) code &= 15;
        return __builtin_convertvector((VI)code, V);
    }
    INLINE V numbers(const uint8_t* steps, int which) {
        if (IS_HALF) return load_halves(steps + 2 * LANES * which);
        return load((const float*)steps + LANES * which);
    }
    INLINE V step(const uint8_t* steps, int) { return numbers(steps, 0); }
    INLINE V least(const uint8_t* steps) { return numbers(steps, 1); }
};

template <bool IS_FINE> struct EightBits {
    static constexpr int CODE_BYTES = 256;
    static constexpr int STEP_BYTES = IS_FINE ? 8 * LANES : 2 * LANES;
    static constexpr int GROUPS = IS_FINE ? 2 : 1;
    static constexpr bool HAS_LEAST = false;

    INLINE V column(const uint8_t* codes, int i) { return bytes_to_floats(codes + LANES * i); }
    INLINE V step(const uint8_t* steps, int group) {
        if (IS_FINE) return load((const float*)steps + LANES * group);
        return load_halves(steps);
    }
    INLINE V least(const uint8_t*) { return V{}; }
};

struct Brains {
    static constexpr int CODE_BYTES = 512;
    static constexpr int STEP_BYTES = 0;
    static constexpr int GROUPS = 1;
    static constexpr bool HAS_LEAST = false;

    INLINE V column(const uint8_t* codes, int i) { return brains_to_floats(codes + 2 * LANES * i); }
    INLINE V step(const uint8_t*, int) { return all_of(1.0f); }
    INLINE V least(const uint8_t*) { return V{}; }
};

template <int FORMAT> struct Unit;
template <> struct Unit<FOUR_HALF> : FourBits<true> {};
template <> struct Unit<FOUR_FLOAT> : FourBits<false> {};
template <> struct Unit<EIGHT_HALF> : EightBits<false> {};
template <> struct Unit<EIGHT_FINE> : EightBits<true> {};
template <> struct Unit<BRAIN> : Brains {};

// An address that the compiler does not trace back to others: it would keep one for each column.
template <typename T> INLINE T* plain_address(T* address) {
    asm("" : "+r"(address));
    return address;
}

// Codes of eight columns of R blocks times T rows of x.
template <typename U, int R, int T>
INLINE void add_columns(const uint8_t* codes, const float* x, int64_t x_stride, V (&sums)[R][T]) {
    const uint8_t* block[R];
    const float* row[T];
#pragma GCC unroll 4
    for (int r = 0; r < R; r++) block[r] = plain_address(codes + r * U::CODE_BYTES);
#pragma GCC unroll 8
    for (int t = 0; t < T; t++) row[t] = plain_address(x + t * x_stride);
#pragma GCC unroll 8
    for (int i = 0; i < WORD_COLUMNS; i++) {
        if (T == MOST_FACTORS) {  // all registers have sums: codes are loaded again for every column
#pragma GCC unroll 4
            for (int r = 0; r < R; r++) block[r] = plain_address(block[r]);
        }
        // What there is less of is kept in registers.
        if constexpr (T <= 2) {
            V factors[T];
#pragma GCC unroll 2
            for (int t = 0; t < T; t++) factors[t] = held(load_to_all(row[t] + i));
#pragma GCC unroll 4
            for (int r = 0; r < R; r++) {
                V code = U::column(block[r], i);
#pragma GCC unroll 2
                for (int t = 0; t < T; t++) sums[r][t] += code * factors[t];
            }
        } else {
            V code[R];
#pragma GCC unroll 4
            for (int r = 0; r < R; r++) code[r] = U::column(block[r], i);
#pragma GCC unroll 8
            for (int t = 0; t < T; t++) {
                V factor = held(load_to_all(row[t] + i));
#pragma GCC unroll 4
                for (int r = 0; r < R; r++) sums[r][t] += code[r] * factor;
            }
        }
    }
}

// Which unit of a piece is that of a block.
INLINE int64_t place_of_unit(int64_t block, int64_t unit, int64_t num_units) {
    return (block / BESIDE * num_units + unit) * BESIDE + block % BESIDE;
}

// The units of R blocks that will be read soon.
template <typename U, int R> INLINE void ask_for_units(const uint8_t* codes, const uint8_t* steps) {
#pragma GCC unroll 16
    for (int line = 0; line < R * U::CODE_BYTES; line += 64)
        __builtin_prefetch(codes + AHEAD_UNITS * BESIDE * U::CODE_BYTES + line, 0, 3);
#pragma GCC unroll 8
    for (int line = 0; line < R * U::STEP_BYTES; line += 64)
        __builtin_prefetch(steps + AHEAD_UNITS * BESIDE * U::STEP_BYTES + line, 0, 3);
}

// Some units of R blocks that lie side by side times T rows of x; `unit_sums` are those of the first.
template <int FORMAT, int R, int T>
static void sum_blocks(const uint8_t* codes, const uint8_t* steps, int64_t num_units,
                       const float* x, int64_t x_stride, const float* unit_sums,
                       int64_t sums_stride, V (*totals)[T]) {
    typedef Unit<FORMAT> U;
    constexpr int WORD_BYTES = U::CODE_BYTES * WORD_COLUMNS / UNIT;
    constexpr int WORDS = UNIT / WORD_COLUMNS / U::GROUPS;
    for (int64_t u = 0; u < num_units; u++) {
        ask_for_units<U, R>(codes, steps);
        const uint8_t* words = codes;
        for (int group = 0; group < U::GROUPS; group++) {
            V sums[R][T] = {};
            for (int word = 0; word < WORDS; word++, words += WORD_BYTES, x += WORD_COLUMNS)
                add_columns<U>(words, x, x_stride, sums);
#pragma GCC unroll 4
            for (int r = 0; r < R; r++) {
                V step = U::step(steps + r * U::STEP_BYTES, group);
#pragma GCC unroll 8
                for (int t = 0; t < T; t++) totals[r][t] += step * sums[r][t];
            }
        }
        if (U::HAS_LEAST) {
#pragma GCC unroll 4
            for (int r = 0; r < R; r++) {
                V least = U::least(steps + r * U::STEP_BYTES);
#pragma GCC unroll 8
                for (int t = 0; t < T; t++) totals[r][t] += least * unit_sums[t * sums_stride + u];
            }
        }
        codes += BESIDE * U::CODE_BYTES;
        steps += BESIDE * U::STEP_BYTES;
    }
}

// Where the outputs of a block go, fewer than eight at the end of a piece.
INLINE void put_block(float* y, V sums, int64_t count) {
    if (count >= BLOCK) return store(y, sums);
    for (int64_t i = 0; i < count; i++) y[i] = sums[i];
}

// What products of some blocks of a piece are made of.
struct Factors {
    const Piece& piece;
    int64_t num_units;
    const float* x;
    int64_t x_stride;
    const float* unit_sums;
};

// R blocks of a piece times T rows of x, into y. Where registers are too few for all blocks at once,
// they take turns while the units of all of them are near.
template <int FORMAT, int R, int T>
static void multiply_blocks(const Factors& factors, int64_t block, int64_t num_left, float* y,
                            int64_t y_stride) {
    typedef Unit<FORMAT> U;
    constexpr int AT_ONCE = T <= 2 || R <= 2 ? R : 2;
    int64_t num_units = factors.num_units, at_once = AT_ONCE == R ? num_units : AHEAD_UNITS;
    V totals[R][T] = {};
    for (int64_t u = 0; u < num_units; u += at_once) {
        int64_t place = place_of_unit(block, u, num_units);
        int64_t count = num_units - u < at_once ? num_units - u : at_once;
#pragma GCC unroll 1
        for (int r = 0; r < R; r += AT_ONCE)
            sum_blocks<FORMAT, AT_ONCE, T>(
                (const uint8_t*)factors.piece.codes + (place + r) * U::CODE_BYTES,
                (const uint8_t*)factors.piece.steps + (place + r) * U::STEP_BYTES, count,
                factors.x + u * UNIT, factors.x_stride, factors.unit_sums + u, num_units,
                totals + r);
    }
    for (int r = 0; r < R; r++)
        for (int t = 0; t < T; t++)
            put_block(y + r * BLOCK + t * y_stride, totals[r][t], num_left - r * BLOCK);
}

// Blocks from the first one on times T rows of x.
template <int FORMAT, int T>
static void factor_rows(const Factors& factors, int64_t first, const Blocks& blocks, float* y) {
    for (int64_t block = first, end = first + blocks.count; block < end;) {
        int64_t left = end - block, beside = BESIDE - block % BESIDE;
        if (beside < left) left = beside;
        int64_t place = (block - first) * BLOCK;
#define BLOCKS(R)                                                                             \
    multiply_blocks<FORMAT, R, T>(factors, block, blocks.num_rows - place, y + place,         \
                                  blocks.y_stride);                                           \
    block += R;
        if (left == 4) {
            BLOCKS(4)
        } else if (left >= 2) {
            BLOCKS(2)
        } else {
            BLOCKS(1)
        }
#undef BLOCKS
    }
}

// Sums of x over each unit, in one order: what a least value is multiplied with.
static void sum_units(const float* x, int64_t x_stride, int num_rows, int64_t num_units, float* out) {
    for (int t = 0; t < num_rows; t++, x += x_stride, out += num_units)
        for (int64_t u = 0; u < num_units; u++) {
            V sum = load(x + u * UNIT);
            for (int at = LANES; at < UNIT; at += LANES) sum += load(x + u * UNIT + at);
            out[u] = fold(sum);
        }
}

template <int FORMAT>
static void packed_blocks(const Piece& piece, int64_t first, int64_t num_columns, const float* x,
                          int64_t x_stride, int num_rows, Near& near, const Blocks& blocks) {
    int64_t num_units = num_columns / UNIT;
    // Formats that are rarer take rows by twos, so that they are compiled sooner.
    constexpr int MOST = FORMAT == FOUR_HALF || FORMAT == EIGHT_HALF ? MOST_FACTORS : 2;
    for (int begin = 0; begin < num_rows;) {
        int left = num_rows - begin, count = left <= MOST ? left : MOST;
        if (left > MOST && left < 2 * MOST) count = (left + 1) / 2;
        Factors factors = {piece, num_units, x + begin * x_stride, x_stride,
                           near.unit_sums.data() + begin * num_units};
        float* y = blocks.y + begin * blocks.y_stride;
#define FACTORS(T)                                                              \
    case T:                                                                     \
        factor_rows<FORMAT, T <= MOST ? T : 1>(factors, first, blocks, y);      \
        break;
        switch (count) {
            FACTORS(1)
            FACTORS(2)
            FACTORS(3)
            FACTORS(4)
            FACTORS(5)
            FACTORS(6)
        }
#undef FACTORS
        begin += count;
    }
}

// What products need to know of x beside x.
static void prepare_factors(const Piece& piece, int64_t num_columns, const float* x,
                            int64_t x_stride, int num_rows, Near& near) {
    if (piece.format != FOUR_HALF && piece.format != FOUR_FLOAT) return;
    int64_t num_units = num_columns / UNIT;
    near.unit_sums.resize(size_t(num_rows * num_units));
    sum_units(x, x_stride, num_rows, num_units, near.unit_sums.data());
}
