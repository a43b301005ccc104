// Products of four-bit codes by dots, with fewer dots than columns ask for.
//
// Codes are from 0 to 15, and sums are those of codes less 8, so that the sum of 32 columns has 32 bits at
// most and becomes one float: w = step (q - 8) + (least + 8 step). Where overflows come and go in between
// does not matter.
//
// Where adding bytes costs less than multiplying them, products of the highest digits are made by twos. With
// digits d, d' and codes q, q' of two columns,
//
//   (d + 120 + q')(d' - 8 + q) = d q + d' q' + (what the digits alone say) + (120 + q')(q - 8)
//
// is one product for two. The first rest is in `paired_centre`. The second is taken off once for all rows of x.
// All are whole numbers, so the results have the same bits either way.
#pragma once

#include "dots_of_bytes.h"

#if HAS_BYTE_DOTS && HAS_WIDE

INLINE Bytes added_bytes(Bytes a, Bytes b) { return (Bytes)((EachByte)a + (EachByte)b); }
INLINE Bytes byte_to_all(int8_t byte) { return (Bytes)(EachByte{} + byte); }
INLINE Bytes four_to_all(const int8_t* bytes) {
    int32_t four;
    memcpy(&four, bytes, 4);
    return to_all_lanes(four);
}

// Four digits are all lanes' within the operation: the compiler would load them into a register first, and
// keep them there for so long that it runs out of registers.
INLINE VI with_dot_of_four(VI sum, Bytes codes, const int8_t* digits) {
    asm("vpdpbusd %2%{1to16%}, %1, %0" : "+v"(sum) : "v"(codes), "m"(*(const int32_t(*)[1])digits));
    return sum;
}

// A unit of a block, ready for any number of rows of x.
struct CentredUnit {
    Bytes words[UNIT_WORDS];
    Bytes beside[UNIT_WORDS];  // the other word of a pair: 120 more at even places, 8 less at odd ones
    V step, least;
    VI rest;  // what sums over pairs lack because of the codes
};

template <bool HAS_REST> INLINE CentredUnit centred_unit(const uint8_t* codes, const uint8_t* steps) {
    typedef Unit<FOUR_HALF> U;
    CentredUnit unit;
    unpack_codes(U{}, codes, unit.words);
    unit.step = U::step(steps, 0);
    unit.least = U::least(steps) + 8.0f * unit.step;
    unit.rest = VI{};
    if (!HAS_REST) return unit;
#pragma GCC unroll 4
    for (int i = 0; i < UNIT_WORDS; i += 2) {
        unit.beside[i] = added_bytes(unit.words[i + 1], byte_to_all(120));
        unit.beside[i + 1] = added_bytes(unit.words[i], byte_to_all(-8));
        unit.rest = with_dot(unit.rest, unit.beside[i], unit.beside[i + 1]);
    }
    unit.rest = -unit.rest;
    return unit;
}

// One word of codes times each digit; of the highest, where pairs are made, two words with the first of them.
template <bool BY_PAIRS>
INLINE void add_word(const CentredUnit& unit, const FactorUnit& own, int i, VI (&sums)[3]) {
    if (BY_PAIRS && i % 2 == 0) {
        Bytes one = added_bytes(four_to_all(own.digits[0] + 4 * i), unit.beside[i]);
        Bytes other = added_bytes(four_to_all(own.digits[0] + 4 * i + 4), unit.beside[i + 1]);
        sums[0] = with_dot(sums[0], one, other);
    }
#pragma GCC unroll 3
    for (int digit = BY_PAIRS ? 1 : 0; digit < 3; digit++)
        sums[digit] = with_dot_of_four(sums[digit], unit.words[i], own.digits[digit] + 4 * i);
}

// A unit times rows of x that take turns, so that no sum waits for itself.
template <int ROWS, bool BY_PAIRS>
INLINE void add_rows(const CentredUnit& unit, const FactorUnit* factors, int64_t stride, V* totals) {
    VI sums[ROWS][3];
#pragma GCC unroll 4
    for (int t = 0; t < ROWS; t++) {
        const FactorUnit& own = factors[t * stride];
        sums[t][0] = unit.rest;
        sums[t][1] = VI{};
        sums[t][2] = to_all_lanes(BY_PAIRS ? own.paired_centre : own.centre);
    }
#pragma GCC unroll 8
    for (int i = 0; i < UNIT_WORDS; i++)
#pragma GCC unroll 4
        for (int t = 0; t < ROWS; t++) add_word<BY_PAIRS>(unit, factors[t * stride], i, sums[t]);
#pragma GCC unroll 4
    for (int t = 0; t < ROWS; t++) {
        const FactorUnit& own = factors[t * stride];
        VI whole = (((sums[t][0] << 8) + sums[t][1]) << 8) + sums[t][2];
        totals[t] += __builtin_convertvector(whole, V) * own.scale * unit.step;
        totals[t] += unit.least * own.sum;
    }
}

// Units of R blocks times one row of x: blocks take turns, and its digits are loaded once for all of them.
template <int R>
INLINE void add_one_row(const uint8_t* codes, const uint8_t* steps, const FactorUnit& own, V (&totals)[R][1]) {
    typedef Unit<FOUR_HALF> U;
    Bytes words[R][UNIT_WORDS];
    VI sums[R][3];
#pragma GCC unroll 4
    for (int r = 0; r < R; r++) {
        unpack_codes(U{}, codes + r * U::CODE_BYTES, words[r]);
        sums[r][0] = sums[r][1] = VI{};
        sums[r][2] = to_all_lanes(own.centre);
    }
#pragma GCC unroll 8
    for (int i = 0; i < UNIT_WORDS; i++)
#pragma GCC unroll 3
        for (int digit = 0; digit < 3; digit++) {
            Bytes digits = four_to_all(own.digits[digit] + 4 * i);
#pragma GCC unroll 4
            for (int r = 0; r < R; r++) sums[r][digit] = with_dot(sums[r][digit], words[r][i], digits);
        }
#pragma GCC unroll 4
    for (int r = 0; r < R; r++) {
        V step = U::step(steps + r * U::STEP_BYTES, 0);
        VI whole = (((sums[r][0] << 8) + sums[r][1]) << 8) + sums[r][2];
        totals[r][0] += __builtin_convertvector(whole, V) * own.scale * step;
        totals[r][0] += (U::least(steps + r * U::STEP_BYTES) + 8.0f * step) * own.sum;
    }
}

// Units of R blocks times T rows of x: two rows at a time, three where one would be left.
template <int R, int T>
INLINE void add_centred(const uint8_t* codes, const uint8_t* steps, const FactorUnit* factors, int64_t stride,
                        V (&totals)[R][T]) {
    typedef Unit<FOUR_HALF> U;
    constexpr int LAST = T % 2 == 0 ? 2 : 3;
#pragma GCC unroll 4
    for (int r = 0; r < R; r++) {
        CentredUnit unit = centred_unit<HAS_PAIRS>(codes + r * U::CODE_BYTES, steps + r * U::STEP_BYTES);
        factors = plain_address(factors);  // else what one block has loaded is kept for the next, on the stack
#pragma GCC unroll 4
        for (int t = 0; t < T - LAST; t += 2)
            add_rows<2, HAS_PAIRS>(unit, factors + t * stride, stride, totals[r] + t);
        add_rows<LAST, HAS_PAIRS>(unit, factors + (T - LAST) * stride, stride, totals[r] + T - LAST);
    }
}
template <int R>
INLINE void add_centred(const uint8_t* codes, const uint8_t* steps, const FactorUnit* factors, int64_t,
                        V (&totals)[R][1]) {
    add_one_row(codes, steps, *factors, totals);
}

#endif
