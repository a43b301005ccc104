// Packed products four columns at a time, where processors can: bytes times bytes, summed up as whole
// numbers. What a weight costs is an operation to make two codes of one byte, and for each row of x three for
// four columns.
#pragma once

#include "pairs.h"

#if HAS_BYTE_DOTS

// What the sums of a group of columns begin with: codes of eight bits are 128 too large.
template <typename U> INLINE int32_t first_sum(const FactorUnit& unit, int group, int digit) {
    if (U::HAS_LEAST) return 0;
    if (U::GROUPS == 1) return -128 * unit.whole[digit];
    return -128 * (group == 0 ? unit.half[digit] : unit.whole[digit] - unit.half[digit]);
}

// Products of a format by dots.
template <int FORMAT> struct ByDots {
    typedef Unit<FORMAT> U;
    // Formats that are rarer take rows by twos, so that they are compiled sooner.
    static constexpr int MOST_ROWS =
        FORMAT == FOUR_HALF || FORMAT == EIGHT_HALF ? (HAS_WIDE ? 8 : 4) : 2;

    // With one digit of three sums are those of the highest ones.
    template <int DIGITS, int R, int T>
    INLINE void add_unit(const uint8_t* codes, const uint8_t* steps, const FactorUnit* unit,
                         int64_t stride, V (&totals)[R][T]) {
        constexpr int GROUP_WORDS = UNIT_WORDS / U::GROUPS;
        Bytes words[R][UNIT_WORDS];
#pragma GCC unroll 4
        for (int r = 0; r < R; r++) unpack_codes(U{}, codes + r * U::CODE_BYTES, words[r]);
#pragma GCC unroll 2
        for (int group = 0; group < U::GROUPS; group++) {
            V step[R], least[R];
#pragma GCC unroll 4
            for (int r = 0; r < R; r++) {
                step[r] = U::step(steps + r * U::STEP_BYTES, group);
                least[r] = U::least(steps + r * U::STEP_BYTES);
            }
#pragma GCC unroll 8
            for (int t = 0; t < T; t++) {
                const FactorUnit& own = unit[t * stride];
                VI sums[DIGITS][R];
#pragma GCC unroll 3
                for (int digit = 0; digit < DIGITS; digit++)
#pragma GCC unroll 4
                    for (int r = 0; r < R; r++)
                        sums[digit][r] = to_all_lanes(first_sum<U>(own, group, digit));
#pragma GCC unroll 8
                for (int i = group * GROUP_WORDS; i < (group + 1) * GROUP_WORDS; i++)
#pragma GCC unroll 3
                    for (int digit = 0; digit < DIGITS; digit++) {
                        int32_t four;
                        memcpy(&four, own.digits[digit] + 4 * i, 4);
                        Bytes digits = to_all_lanes(four);
#pragma GCC unroll 4
                        for (int r = 0; r < R; r++)
                            sums[digit][r] = with_dot(sums[digit][r], words[r][i], digits);
                    }
#pragma GCC unroll 4
                for (int r = 0; r < R; r++) {
                    V sum;
                    if constexpr (DIGITS == 1) {
                        sum = __builtin_convertvector(sums[0][r], V) * 65536.0f;
                    } else {
                        VI upper = (sums[0][r] << 8) + sums[1][r];
                        sum = __builtin_convertvector(upper, V) * 256.0f +
                              __builtin_convertvector(sums[2][r], V);
                    }
                    totals[r][t] += sum * own.scale * step[r];
                    if (U::HAS_LEAST) totals[r][t] += least[r] * own.sum;
                }
            }
        }
    }

    // R blocks of a piece times T rows of x, into y.
    template <int R, int T, int DIGITS = 3>
    static void multiply(const Piece& piece, const Factors& factors, int64_t block, int64_t num_left,
                         float* y, int64_t y_stride, const Coming& coming) {
        int64_t num_units = factors.num_units, place = place_of_unit(block, 0, num_units);
        const uint8_t* codes = (const uint8_t*)piece.codes + place * U::CODE_BYTES;
        const uint8_t* steps = (const uint8_t*)piece.steps + place * U::STEP_BYTES;
        Ahead<U, R> ahead(codes, steps, num_units, coming);
        V totals[R][T] = {};
        for (int64_t u = 0; u < num_units; u++) {
            ahead.ask();
#if HAS_WIDE
            if constexpr (FORMAT == FOUR_HALF && DIGITS == 3)
                add_centred(codes, steps, factors.units + u, num_units, totals);
            else
#endif
                add_unit<DIGITS>(codes, steps, factors.units + u, num_units, totals);
            codes += BESIDE * U::CODE_BYTES;
            steps += BESIDE * U::STEP_BYTES;
        }
#pragma GCC unroll 4
        for (int r = 0; r < R; r++)
#pragma GCC unroll 8
            for (int t = 0; t < T; t++)
                put_block(y + r * BLOCK + t * y_stride, totals[r][t], num_left - r * BLOCK);
    }
};

template <int FORMAT> struct Products : ByDots<FORMAT> {};

// What the highest digits of x alone make of products: about a third of the work.
template <int FORMAT> struct HighestDigits {
    static constexpr int MOST_ROWS = ByDots<FORMAT>::MOST_ROWS;

    template <int R, int T>
    static void multiply(const Piece& piece, const Factors& factors, int64_t block, int64_t num_left,
                         float* y, int64_t y_stride, const Coming& coming) {
        ByDots<FORMAT>::template multiply<R, T, 1>(piece, factors, block, num_left, y, y_stride, coming);
    }
};
template <> struct Products<BRAIN> : ByColumns<BRAIN> {};
#else
template <int FORMAT> struct Products : ByColumns<FORMAT> {};
#endif
