// What all products share: formats, and products of rows of floats.
#pragma once

#include "simd.h"

#include <vector>

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
    const float* lengths;  // of each row, where its largest products are looked for; else missing
    int32_t num_pieces;
    int32_t num_rows;
    int32_t num_columns;
    int32_t unused;
};

constexpr int BLOCK = LANES;  // rows that are packed together
constexpr int UNIT = 32;
constexpr int TILE = 4;
constexpr int MOST_AT_ONCE = HAS_WIDE ? 6 : 3;
constexpr int BESIDE = 32 / BLOCK;  // blocks whose units lie side by side
constexpr int NEAR_BLOCKS = BESIDE;
constexpr int NEAR_TILES = NEAR_BLOCKS * BLOCK / TILE;
constexpr int NEAR_COLUMNS = 768;
constexpr int MOST_ROWS = 96;
constexpr int SLICE = 128;

// What one row of x has of 32 columns, as whole numbers: x is nearly `scale` times what three digits to
// the base 256 say, the highest first. The scale is a power of two, and the largest of the 32 numbers
// has 22 or 23 bits.
struct alignas(64) FactorUnit {
    int8_t digits[3][UNIT];
    int16_t whole[3], half[3];  // the sum of each digit, over all columns and the first half
    int32_t centre;  // -8 times the sum of the numbers
    int32_t paired_centre;  // that, less what sums over pairs have too much
    float scale;
    float sum;  // of the 32 columns
};
// Two lines of the cache: with three, a pass of one row takes 4% longer.
static_assert(sizeof(FactorUnit) == 128, "");

// What one thread needs beside the factors.
struct Near {
    alignas(64) V sums[NEAR_TILES][MOST_ROWS * TILE];
    alignas(64) float slice[MOST_ROWS * SLICE];
    std::vector<FactorUnit> units;  // of each row of x
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
#pragma GCC unroll 4
        for (int t = FOURS; t < T; t++) put(t, fold4(at(0, t), at(1, t), at(2, t), at(3, t)));
    }
};

// Four rows of floats times T rows of x. Where these are not all columns, `kept` has the sums.
template <int T, bool IS_WHOLE>
static void tile(const float* const* w, const float* x, int64_t x_stride, int64_t columns, V* kept,
                 const Sink& sink) {
    V sums[TILE][T];
#pragma GCC unroll 8
    for (int r = 0; r < TILE; r++)
#pragma GCC unroll 8
        for (int t = 0; t < T; t++) sums[r][t] = IS_WHOLE ? V{} : kept[t * TILE + r];
    const float *w0 = w[0], *w1 = w[1], *w2 = w[2], *w3 = w[3];
    int64_t k = 0;
    for (; k + LANES <= columns; k += LANES) {
#if HAS_WIDE
        V r0 = load(w0 + k), r1 = load(w1 + k), r2 = load(w2 + k), r3 = load(w3 + k);
#pragma GCC unroll 8
        for (int t = 0; t < T; t++) {
            V one = held(load(x + t * x_stride + k));
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
        for (int r = 0; r < TILE; r++) {
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
        for (int r = 0; r < TILE; r++) kept[t * TILE + r] = sums[r][t];
}

// Where the results of some blocks or tiles go, from the first of them on.
struct Blocks {
    int count;
    int64_t num_rows;  // of the piece, from the first block on
    float* y;
    int64_t y_stride;

    inline __attribute__((always_inline)) Sink sink(int block, int first = 0) const {
        int64_t left = num_rows - block * TILE;
        return {y + block * TILE + first * y_stride, y_stride, int(left < TILE ? left : TILE)};
    }
};

template <int T>
INLINE void tile_blocks(const float* const* w, const float* x, int64_t x_stride, int64_t columns,
                        Near& near, const Blocks& blocks, int first, bool is_whole) {
    for (int block = 0; block < blocks.count; block++, w += TILE) {
        V* kept = near.sums[block] + first * TILE;
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

// Blocks of rows of floats times rows of x, some of the columns at a time.
static void float_rows(const float* w, int64_t num_columns, const float* x, int64_t x_stride,
                       int num_rows, Near& near, const Blocks& blocks) {
    Blocks own = blocks;
    own.count *= BLOCK / TILE;
    bool is_whole = num_columns <= NEAR_COLUMNS;
    if (!is_whole)
        for (int block = 0; block < own.count; block++)
            memset(near.sums[block], 0, sizeof(V) * size_t(num_rows) * TILE);
    const float* rows[NEAR_TILES * TILE];
    for (int64_t k = 0; k < num_columns; k += NEAR_COLUMNS) {
        int64_t columns = num_columns - k < NEAR_COLUMNS ? num_columns - k : NEAR_COLUMNS;
        for (int r = 0; r < NEAR_TILES * TILE; r++) {
            int64_t there = r < blocks.num_rows ? r : blocks.num_rows - 1;
            rows[r] = w + there * num_columns + k;
        }
        tiles(rows, x + k, x_stride, num_rows, columns, near, own, is_whole);
    }
    if (is_whole) return;
    for (int block = 0; block < own.count; block++) {
        const V* sums = near.sums[block];
        Sink sink = own.sink(block);
        for (int t = 0; t < num_rows; t++, sums += TILE)
            sink.put(t, fold4(sums[0], sums[1], sums[2], sums[3]));
    }
}
