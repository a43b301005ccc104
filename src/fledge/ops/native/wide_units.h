// Packed products with thirty-two registers of sixteen floats: lanes are columns.
//
// A block is four rows, and a unit is what it has of 32 columns:
//
//   FOUR   64 bytes: nibble 2r+h of lane l is row r, column 16h+l; w = step q + least
//   EIGHT  128 bytes: row after row, 32 signed bytes each; w = step q
//   BRAIN  256 bytes: row after row, 32 bfloat16 each
//
// Up to FEW rows of x, weights are unpacked in registers and used at once; up to twice as many, that is
// done twice. For more rows the four rows are unpacked into memory that stays near, and multiplied from
// there.
#pragma once

#include "tiles.h"

constexpr int BESIDE = 1;  // blocks whose units lie side by side
constexpr int FEW = 8;
constexpr int AHEAD_BYTES = 4096;

template <bool IS_HALF> struct FourBits {
    static constexpr int CODE_BYTES = 64;
    static constexpr int NUM_STEPS = 8;
    static constexpr bool HAS_HALVES = IS_HALF;

    INLINE void row(const uint8_t* codes, const float* steps, int r, V& low, V& high) {
        const V count = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
        VI packed;
        memcpy(&packed, codes, 64);
        V table = count * steps[r] + steps[4 + r];
        low = look_up(packed >> (8 * r), table);
        high = look_up(packed >> (8 * r + 4), table);
    }
};

template <bool IS_FINE> struct EightBits {
    static constexpr int CODE_BYTES = 128;
    static constexpr int PER_ROW = IS_FINE ? 2 : 1;
    static constexpr int NUM_STEPS = BLOCK * PER_ROW;
    static constexpr bool HAS_HALVES = !IS_FINE;

    INLINE void row(const uint8_t* codes, const float* steps, int r, V& low, V& high) {
        low = bytes_to_floats(codes + 32 * r) * steps[PER_ROW * r];
        high = bytes_to_floats(codes + 32 * r + 16) * steps[PER_ROW * r + PER_ROW - 1];
    }
};

struct Brains {
    static constexpr int CODE_BYTES = 256;
    static constexpr int NUM_STEPS = 0;
    static constexpr bool HAS_HALVES = false;

    INLINE void row(const uint8_t* codes, const float*, int r, V& low, V& high) {
        low = brains_to_floats(codes + 64 * r);
        high = brains_to_floats(codes + 64 * r + 32);
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
        if (!K::HAS_HALVES) return (const float*)packed;
        halves_to_floats((const uint16_t*)packed, int(num_units) * K::NUM_STEPS, room);
        return room;
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

// Some rows of a packed block times T rows of x, unpacked on the way.
template <int FORMAT, int T, int FIRST, int COUNT>
INLINE void sum_rows(const uint8_t* codes, const uint8_t* steps, int64_t num_units, const float* x,
                     int64_t x_stride, V (&sums)[COUNT][T]) {
    typedef Unit<FORMAT> U;
    float room[NEAR_UNITS * U::NUM_STEPS + 1];
    for (int64_t begin = 0; begin < num_units; begin += NEAR_UNITS) {
        int64_t end = num_units - begin < NEAR_UNITS ? num_units : begin + NEAR_UNITS;
        const float* near = U::steps(steps + begin * U::STEP_BYTES, end - begin, room);
        if (FIRST == 0) ask_for_steps<U>(steps + begin * U::STEP_BYTES, end - begin);
        for (int64_t u = begin; u < end; u++, near += U::NUM_STEPS) {
            if (FIRST == 0) ask_for<U::CODE_BYTES>(codes + u * U::CODE_BYTES);
            V low[COUNT], high[COUNT];
#pragma GCC unroll 8
            for (int r = 0; r < COUNT; r++)
                U::row(codes + u * U::CODE_BYTES, near, FIRST + r, low[r], high[r]);
#pragma GCC unroll 16
            for (int t = 0; t < T; t++) {
                V one = held(load(x + t * x_stride + u * UNIT));
                V other = held(load(x + t * x_stride + u * UNIT + LANES));
#pragma GCC unroll 8
                for (int r = 0; r < COUNT; r++) {
                    sums[r][t] += low[r] * one;
                    sums[r][t] += high[r] * other;
                }
            }
        }
    }
}

template <int FORMAT, int T>
static void few_rows(const uint8_t* codes, const uint8_t* steps, int64_t num_units, const float* x,
                     int64_t x_stride, const Sink& sink) {
    if (T <= 4) {
        V sums[BLOCK][T] = {};
        sum_rows<FORMAT, T, 0, BLOCK>(codes, steps, num_units, x, x_stride, sums);
        sink.template put_all<T>([&](int r, int t) { return sums[r][t]; });
        return;
    }
    // Registers are too few for all four rows at once.
    V first[2][T] = {}, kept[2][T];
    sum_rows<FORMAT, T, 0, 2>(codes, steps, num_units, x, x_stride, first);
    memcpy(kept, first, sizeof(kept));
    V second[2][T] = {};
    sum_rows<FORMAT, T, 2, 2>(codes, steps, num_units, x, x_stride, second);
    sink.template put_all<T>([&](int r, int t) { return r < 2 ? kept[r][t] : second[r - 2][t]; });
}

template <int FORMAT>
static void unpack(const uint8_t* codes, const uint8_t* steps, int64_t num_units, float* panel) {
    typedef Unit<FORMAT> U;
    float room[NEAR_UNITS * U::NUM_STEPS + 1];
    const float* near = U::steps(steps, num_units, room);
    for (int64_t u = 0; u < num_units; u++) {
        ask_for<U::CODE_BYTES>(codes + u * U::CODE_BYTES);
#pragma GCC unroll 8
        for (int r = 0; r < BLOCK; r++) {
            V low, high;
            U::row(codes + u * U::CODE_BYTES, near + u * U::NUM_STEPS, r, low, high);
            store(panel + r * NEAR_COLUMNS + u * UNIT, low);
            store(panel + r * NEAR_COLUMNS + u * UNIT + LANES, high);
        }
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

template <int FORMAT>
static void packed_rows(const uint8_t* codes, const uint8_t* steps, int64_t num_columns,
                        const float* x, int64_t x_stride, int num_rows, Near& near,
                        const Blocks& blocks) {
    typedef Unit<FORMAT> U;
    int64_t units = num_columns / UNIT;
    // Formats that are rarer take rows by fours, so that they are compiled sooner.
    constexpr bool IS_USUAL = FORMAT == FOUR_HALF || FORMAT == EIGHT_HALF;
    if (num_rows > 2 * FEW)
        return many_rows<FORMAT>(codes, steps, num_columns, x, x_stride, num_rows, near, blocks);
    if (num_rows > (IS_USUAL ? FEW : 4)) {
        int some = IS_USUAL ? (num_rows + 1) / 2 : 4;
        Blocks rest = blocks;
        rest.y += some * rest.y_stride;
        packed_rows<FORMAT>(codes, steps, num_columns, x, x_stride, some, near, blocks);
        return packed_rows<FORMAT>(codes, steps, num_columns, x + some * x_stride, x_stride,
                                   num_rows - some, near, rest);
    }
    for (int block = 0; block < blocks.count; block++) {
        Sink sink = blocks.sink(block);
#define FEW_ROWS(T)                                                                \
    case T:                                                                        \
        few_rows<IS_USUAL || T <= 4 ? FORMAT : FOUR_HALF, T>(codes, steps, units, x, x_stride, sink); \
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

template <int FORMAT>
static void packed_blocks(const Piece& piece, int64_t first, int64_t num_columns, const float* x,
                          int64_t x_stride, int num_rows, Near& near, const Blocks& blocks) {
    typedef Unit<FORMAT> U;
    int64_t unit = first * (num_columns / UNIT);
    packed_rows<FORMAT>((const uint8_t*)piece.codes + unit * U::CODE_BYTES,
                        (const uint8_t*)piece.steps + unit * U::STEP_BYTES, num_columns, x,
                        x_stride, num_rows, near, blocks);
}

// Which unit of a piece is that of a block.
INLINE int64_t place_of_unit(int64_t block, int64_t unit, int64_t num_units) {
    return block * num_units + unit;
}

// What products need to know of x beside x: nothing here.
static void prepare_factors(const Piece&, int64_t, const float*, int64_t, int, Near&) {}
