// Packed products column by column: codes become floats, which are multiplied with the floats of x. What a
// weight costs is two or three operations to make its code a float, and one for each row of x.
#pragma once

#include "factors.h"

constexpr int MOST_FACTORS = 6;  // rows of x at once

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

// Some units of R blocks that lie side by side times T rows of x, from unit `first` on.
template <int FORMAT, int R, int T>
static void add_column_units(const uint8_t* codes, const uint8_t* steps, int64_t first, int64_t num_units,
                             const Factors& factors, V (*totals)[T]) {
    typedef Unit<FORMAT> U;
    constexpr int WORD_BYTES = U::CODE_BYTES * WORD_COLUMNS / UNIT;
    constexpr int WORDS = UNIT / WORD_COLUMNS / U::GROUPS;
    const float* x = factors.x + first * UNIT;
    for (int64_t u = first; u < first + num_units; u++) {
        ask_for_units<U, R, FIRST_CACHE>(codes + NEAR_UNITS * BESIDE * U::CODE_BYTES,
                                         steps + NEAR_UNITS * BESIDE * U::STEP_BYTES);
        const uint8_t* words = codes;
        for (int group = 0; group < U::GROUPS; group++) {
            V sums[R][T] = {};
            for (int word = 0; word < WORDS; word++, words += WORD_BYTES, x += WORD_COLUMNS)
                add_columns<U>(words, x, factors.stride, sums);
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
                for (int t = 0; t < T; t++)
                    totals[r][t] += least * factors.units[t * factors.num_units + u].sum;
            }
        }
        codes += BESIDE * U::CODE_BYTES;
        steps += BESIDE * U::STEP_BYTES;
    }
}

// Products of a format by columns.
template <int FORMAT> struct ByColumns {
    typedef Unit<FORMAT> U;
    // Formats that are rarer take rows by twos, so that they are compiled sooner.
    static constexpr int MOST_ROWS = FORMAT == FOUR_HALF || FORMAT == EIGHT_HALF ? MOST_FACTORS : 2;

    // R blocks of a piece times T rows of x, into y. Where registers are too few for all blocks at
    // once, they take turns while the units of all of them are near.
    template <int R, int T>
    static void multiply(const Piece& piece, const Factors& factors, int64_t block, int64_t num_left,
                         float* y, int64_t y_stride, const Coming&) {
        constexpr int AT_ONCE = T <= 2 || R <= 2 ? R : 2;
        int64_t num_units = factors.num_units, at_once = AT_ONCE == R ? num_units : NEAR_UNITS;
        V totals[R][T] = {};
        for (int64_t u = 0; u < num_units; u += at_once) {
            int64_t place = place_of_unit(block, u, num_units);
            int64_t count = num_units - u < at_once ? num_units - u : at_once;
#pragma GCC unroll 1
            for (int r = 0; r < R; r += AT_ONCE)
                add_column_units<FORMAT, AT_ONCE, T>(
                    (const uint8_t*)piece.codes + (place + r) * U::CODE_BYTES,
                    (const uint8_t*)piece.steps + (place + r) * U::STEP_BYTES, u, count, factors,
                    totals + r);
        }
        for (int r = 0; r < R; r++)
            for (int t = 0; t < T; t++)
                put_block(y + r * BLOCK + t * y_stride, totals[r][t], num_left - r * BLOCK);
    }
};
