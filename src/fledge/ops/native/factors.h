// Rows of x for products, and what packed weights need to know of them beside.
//
// Codes are whole numbers of few bits. Where processors multiply bytes, 32 columns of x become whole numbers
// too. They are multiplied with codes and summed up without any rounding, four columns at a time. What is
// rounded is x, to 22 or 23 bits of the largest of the 32, and one sum for 32 columns. That is about what
// float32 sums round; more only where a column is far larger than the others and hardly weighs.
#pragma once

#include "units.h"

struct Factors {
    const float* x;
    int64_t stride, num_rows;
    const FactorUnit* units;  // [rows, units]
    int64_t num_units;

    Factors from(int64_t row) const {
        return {x + row * stride, stride, num_rows - row, units + row * num_units, num_units};
    }
};

#if HAS_BYTE_DOTS

constexpr int LARGEST_FACTOR = 127 * 65536 + 127 * 256 + 127;  // of three digits from -128 to 127

// A digit in the lowest byte of each lane; the highest is digit 0.
INLINE VI digit_of(VI number, int digit) {
    return digit == 2 ? number : (number + (digit == 1 ? 0x80 : 0x8080)) >> (digit == 1 ? 8 : 16);
}

// The exponent of the power of two whose multiples the numbers become, by the bits of the largest of
// them. Numbers below 2^-100 become multiples of 2^-122.
INLINE int32_t exponent_of_scale(int32_t largest_bits) {
    int32_t is_high = (largest_bits & 0x7fffff) > (LARGEST_FACTOR - 0x400000) * 2;
    int32_t exponent = (largest_bits >> 23) - 22 + is_high;
    return exponent < 5 ? 5 : exponent;
}

INLINE float power_of_two(int32_t exponent) {
    int32_t bits = exponent << 23;
    float power;
    memcpy(&power, &bits, 4);
    return power;
}

template <bool HAS_OFFSETS> INLINE void prepare_unit(const float* x, FactorUnit& unit) {
    constexpr int PARTS = UNIT / LANES;
    typedef int8_t Digits __attribute__((vector_size(LANES)));
    V own[PARTS];
    VI largest = {};
#pragma GCC unroll 4
    for (int part = 0; part < PARTS; part++) {
        own[part] = load(x + part * LANES);
        VI size = (VI)own[part] & 0x7fffffff;
        largest = size > largest ? size : largest;
    }
    int32_t bits = join_lanes(largest, [](auto a, auto b) { return a > b ? a : b; });
    int32_t exponent = exponent_of_scale(bits);
    float per_scale = power_of_two(254 - exponent);
    // Where one of the numbers is not finite, no product is.
    unit.scale = bits < 0x7f800000 ? power_of_two(exponent) : NAN;
    auto added = [](auto a, auto b) { return a + b; };
    VI sum = {};
    VI digit_sums[3][2] = {};
#pragma GCC unroll 4
    for (int part = 0; part < PARTS; part++) {
        V scaled = own[part] * per_scale;
        V half = (V)(((VI)scaled & INT32_MIN) | (VI)all_of(0.5f));
        VI number = __builtin_convertvector(scaled + half, VI);
        sum += number;
#pragma GCC unroll 3
        for (int digit = 0; digit < 3; digit++) {
            VI words = digit_of(number, digit);
            Digits digits = __builtin_convertvector(words, Digits);
            memcpy(unit.digits[digit] + part * LANES, &digits, LANES);
            if (HAS_OFFSETS) digit_sums[digit][2 * part >= PARTS] += words << 24 >> 24;
        }
    }
    unit.sum = float(join_lanes(sum, added)) * unit.scale;
    if (!HAS_OFFSETS) return;
    for (int digit = 0; digit < 3; digit++) {
        unit.half[digit] = -128 * join_lanes(digit_sums[digit][0], added);
        unit.whole[digit] = unit.half[digit] - 128 * join_lanes(digit_sums[digit][1], added);
    }
}

#else

// Columns are multiplied as they are: only their sum is asked for.
template <bool HAS_OFFSETS> INLINE void prepare_unit(const float* x, FactorUnit& unit) {
    V sum = load(x);
    for (int at = LANES; at < UNIT; at += LANES) sum += load(x + at);
    unit.sum = fold(sum);
}

#endif

// What packed pieces of a matrix ask for beside x.
struct Asked {
    bool is_any, has_offsets;
};

static Asked asked_by(const Matrix& matrix) {
    Asked asked = {};
    for (int p = 0; p < matrix.num_pieces; p++) {
        int format = matrix.pieces[p].format;
        bool has_least = format == FOUR_HALF || format == FOUR_FLOAT;
        bool has_bytes = HAS_BYTE_DOTS && (format == EIGHT_HALF || format == EIGHT_FINE);
        asked.is_any |= has_least || has_bytes;
        asked.has_offsets |= has_bytes;
    }
    return asked;
}

template <bool HAS_OFFSETS>
static void prepare_row(const Factors& factors, int64_t t, FactorUnit* units) {
    for (int64_t u = 0; u < factors.num_units; u++)
        prepare_unit<HAS_OFFSETS>(factors.x + t * factors.stride + u * UNIT, units[t * factors.num_units + u]);
}

static void prepare_rows(const Factors& factors, Asked asked, int64_t begin, int64_t end, FactorUnit* units) {
    for (int64_t t = begin; t < end; t++) {
        if (asked.has_offsets) prepare_row<true>(factors, t, units);
        else prepare_row<false>(factors, t, units);
    }
}

// The factors of one product over few rows, made by each thread that has a part in it when it begins with the
// first: sharing that out would take longer.
class OwnFactors {
  public:
    OwnFactors(const Matrix& matrix, const float* x, int64_t stride, int64_t num_rows, Near& near)
        : matrix_(matrix), near_(near), factors_{x, stride, num_rows, nullptr, matrix.num_columns / UNIT} {}
    // Over rows that have been prepared.
    OwnFactors(const Matrix& matrix, const Factors& factors, Near& near)
        : matrix_(matrix), near_(near), factors_(factors), is_ready_(true) {}

    const Factors& get() {
        if (!is_ready_) prepare();
        return factors_;
    }

  private:
    void prepare() {
        is_ready_ = true;
        Asked asked = asked_by(matrix_);
        if (!asked.is_any) return;
        int64_t count = factors_.num_rows * factors_.num_units;
        if (int64_t(near_.units.size()) < count) near_.units.resize(size_t(count));
        prepare_rows(factors_, asked, 0, factors_.num_rows, near_.units.data());
        factors_.units = near_.units.data();
    }

    const Matrix& matrix_;
    Near& near_;
    Factors factors_;
    bool is_ready_ = false;
};
