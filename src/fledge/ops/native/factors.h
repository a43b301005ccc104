// Rows of x for products, and what of them packed weights are multiplied with: whole numbers.
//
// Codes are whole numbers of few bits. Made whole numbers as well, 32 columns of x are multiplied with them
// and summed up without any rounding, four bytes at a time. What is rounded is x, to 22 or 23 bits of
// the largest of the 32, and then one sum for 32 columns: together not more than 32 float32 sums round.
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

constexpr int LARGEST_FACTOR = 127 * 65536 + 127 * 256 + 127;  // of three digits from -128 to 127

// A digit in the lowest byte of each lane; the highest is digit 0.
INLINE VI digit_of(VI number, int digit) {
    return digit == 2 ? number : (number + (digit == 1 ? 0x80 : 0x8080)) >> (digit == 1 ? 8 : 16);
}

// The power of two whose multiples the numbers become, by the bits of the largest of them; none if one of
// them is not finite. Numbers below 2^-100 become multiples of 2^-122.
INLINE float scale_of(int32_t largest_bits) {
    if (largest_bits >= 0x7f800000) return NAN;
    int32_t exponent = largest_bits >> 23;
    bool is_high = (largest_bits & 0x7fffff) > (LARGEST_FACTOR - 0x400000) * 2;
    int32_t found = exponent - 22 + (is_high ? 1 : 0);
    int32_t bits = (found < 5 ? 5 : found) << 23;
    float scale;
    memcpy(&scale, &bits, 4);
    return scale;
}

static void prepare_unit(const float* x, bool has_offsets, FactorUnit& unit) {
    constexpr int PARTS = UNIT / LANES;
    typedef int8_t Bytes __attribute__((vector_size(LANES)));
    V own[PARTS];
    VI largest = {};
    for (int part = 0; part < PARTS; part++) {
        own[part] = load(x + part * LANES);
        VI size = (VI)own[part] & 0x7fffffff;
        largest = size > largest ? size : largest;
    }
    unit.scale = scale_of(join_lanes(largest, [](auto a, auto b) { return a > b ? a : b; }));
    float per_scale = 1.0f / unit.scale;
    auto added = [](auto a, auto b) { return a + b; };
    VI sum = {};
    VI digit_sums[3][2] = {};
    for (int part = 0; part < PARTS; part++) {
        V scaled = own[part] * per_scale;
        V half = (V)(((VI)scaled & INT32_MIN) | (VI)all_of(0.5f));
        VI number = __builtin_convertvector(scaled + half, VI);
        sum += number;
#pragma GCC unroll 3
        for (int digit = 0; digit < 3; digit++) {
            VI words = digit_of(number, digit);
            Bytes bytes = __builtin_convertvector(words, Bytes);
            memcpy(unit.digits[digit] + part * LANES, &bytes, LANES);
            if (has_offsets) digit_sums[digit][2 * part >= PARTS] += words << 24 >> 24;
        }
    }
    unit.sum = float(join_lanes(sum, added)) * unit.scale;
    if (!has_offsets) return;
    for (int digit = 0; digit < 3; digit++) {
        unit.half[digit] = -128 * join_lanes(digit_sums[digit][0], added);
        unit.whole[digit] = unit.half[digit] - 128 * join_lanes(digit_sums[digit][1], added);
    }
}

// The factors of one product, made by each thread that has a part in it when it begins with the first.
class OwnFactors {
  public:
    OwnFactors(const Matrix& matrix, const float* x, int64_t stride, int64_t num_rows, Near& near)
        : matrix_(matrix), near_(near), factors_{x, stride, num_rows, nullptr, matrix.num_columns / UNIT} {}

    const Factors& get() {
        if (!is_ready_) prepare();
        return factors_;
    }

  private:
    void prepare() {
        is_ready_ = true;
        bool is_packed = false, has_offsets = false;
        for (int p = 0; p < matrix_.num_pieces; p++) {
            int format = matrix_.pieces[p].format;
            is_packed |= format != FLOATS && format != BRAIN;
            has_offsets |= HAS_BYTE_DOTS && (format == EIGHT_HALF || format == EIGHT_FINE);
        }
        if (!is_packed) return;
        int64_t count = factors_.num_rows * factors_.num_units;
        if (int64_t(near_.units.size()) < count) near_.units.resize(size_t(count));
        FactorUnit* unit = near_.units.data();
        factors_.units = unit;
        for (int64_t t = 0; t < factors_.num_rows; t++)
            for (int64_t u = 0; u < factors_.num_units; u++, unit++)
                prepare_unit(factors_.x + t * factors_.stride + u * UNIT, has_offsets, *unit);
    }

    const Matrix& matrix_;
    Near& near_;
    Factors factors_;
    bool is_ready_ = false;
};
