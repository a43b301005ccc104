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

// Of three digits, the highest from -120 to 119 and the others from -128 to 127.
constexpr int LARGEST_FACTOR = 119 * 65536 + 127 * 256 + 127;
constexpr int UNIT_PARTS = UNIT / LANES;
constexpr int64_t SHIFTS = int64_t(0xf8f8f8f878787878);  // four columns 120 up, four columns 8 down

// The exponent of the power of two whose multiples the numbers become, by the bits of the largest of
// them. Numbers below 2^-100 become multiples of 2^-122.
INLINE VI exponents_of_scales(VI largest_bits) {
    VI is_high = (largest_bits & 0x7fffff) > VI{} + (LARGEST_FACTOR - 0x400000) * 2;
    VI exponent = (largest_bits >> 23) - 22 - is_high;
    return exponent < 5 ? VI{} + 5 : exponent;
}

#if HAS_WIDE
typedef int8_t EachByte __attribute__((vector_size(4 * LANES)));

// Bytes `FIRST` of all 32 numbers, then bytes `SECOND`.
template <int FIRST, int SECOND> INLINE EachByte two_digits(VI a, VI b) {
#define EIGHT_BYTES(at) at, at + 4, at + 8, at + 12, at + 16, at + 20, at + 24, at + 28
#define ALL_BYTES(byte) EIGHT_BYTES(byte), EIGHT_BYTES(byte + 32), EIGHT_BYTES(byte + 64), EIGHT_BYTES(byte + 96)
    return __builtin_shufflevector((EachByte)a, (EachByte)b, ALL_BYTES(FIRST), ALL_BYTES(SECOND));
#undef ALL_BYTES
#undef EIGHT_BYTES
}
#endif

// The digits of numbers, which are bytes once each has 128 more; returns lanes of the products of pairs.
INLINE VI put_digits(const VI (&numbers)[UNIT_PARTS], FactorUnit& unit) {
    VI bytes[UNIT_PARTS];
#pragma GCC unroll 4
    for (int part = 0; part < UNIT_PARTS; part++) bytes[part] = (numbers[part] + 0x808080) ^ 0x808080;
#if HAS_WIDE
    EachByte upper = two_digits<2, 1>(bytes[0], bytes[1]), lower = two_digits<0, 2>(bytes[0], bytes[1]);
    // What keeps sums of highest digits and codes within a byte.
    lower += (EachByte)_mm512_set_epi64(SHIFTS, SHIFTS, SHIFTS, SHIFTS, 0, 0, 0, 0);
    memcpy(unit.digits[0], &upper, sizeof(upper));
    memcpy(unit.digits[2], &lower, UNIT);
    __m512i others = _mm512_shuffle_epi32((__m512i)lower, _MM_PERM_CDAB);
    return (VI)_mm512_maskz_dpbusd_epi32(0x5500, _mm512_setzero_si512(), (__m512i)lower, others);
#else
    typedef int8_t Digits __attribute__((vector_size(LANES)));
#pragma GCC unroll 4
    for (int part = 0; part < UNIT_PARTS; part++)
#pragma GCC unroll 3
        for (int digit = 0; digit < 3; digit++) {
            Digits digits = __builtin_convertvector(bytes[part] >> (16 - 8 * digit), Digits);
            memcpy(unit.digits[digit] + part * LANES, &digits, LANES);
        }
    return VI{};
#endif
}

// What eight-bit codes ask for.
INLINE void put_offsets(FactorUnit& unit) {
    for (int digit = 0; digit < 3; digit++) {
        int16_t half = 0, rest = 0;
        for (int i = 0; i < UNIT / 2; i++) {
            half += unit.digits[digit][i];
            rest += unit.digits[digit][UNIT / 2 + i];
        }
        unit.half[digit] = half;
        unit.whole[digit] = int16_t(half + rest);
    }
}

// Up to as many units as there are lanes, from x to `units`.
static void prepare_some(const float* const (&x)[LANES], FactorUnit* const (&units)[LANES], int count,
                         bool has_offsets) {
    VI joined[LANES] = {};
    for (int u = 0; u < count; u++) {
        VI largest = {};
#pragma GCC unroll 4
        for (int part = 0; part < UNIT_PARTS; part++) {
            VI size = (VI)load(x[u] + part * LANES) & 0x7fffffff;
            largest = size > largest ? size : largest;
        }
        joined[u] = largest;
    }
    VI bits = join_each(joined, [](VI a, VI b) { return a > b ? a : b; });
    VI exponents = exponents_of_scales(bits);
    alignas(64) float per_scale[LANES], scales[LANES], sums[LANES];
    // Where one of the numbers is not finite, no product is.
    V scale = (V)(bits < 0x7f800000 ? exponents << 23 : VI{} + 0x7fc00000);
    store(per_scale, (V)((254 - exponents) << 23));
    store(scales, scale);
    VI pairs[LANES] = {};
    for (int u = 0; u < count; u++) {
        VI numbers[UNIT_PARTS];
        joined[u] = VI{};
#pragma GCC unroll 4
        for (int part = 0; part < UNIT_PARTS; part++) {
            V scaled = load(x[u] + part * LANES) * load_to_all(per_scale + u);
            V half = (V)(((VI)scaled & INT32_MIN) | (VI)all_of(0.5f));
            numbers[part] = __builtin_convertvector(scaled + half, VI);
            joined[u] += numbers[part];
        }
        pairs[u] = put_digits(numbers, *units[u]);
        if (has_offsets) put_offsets(*units[u]);
    }
    auto added = [](VI a, VI b) { return a + b; };
    VI whole = join_each(joined, added);
    VI too_much = (join_each(pairs, added) + UNIT / 2 * 120 * 8) << 16;
    alignas(64) float centres[LANES], paired_centres[LANES];  // as bits
    store(centres, (V)(-8 * whole));
    store(paired_centres, (V)(-8 * whole - too_much));
    store(sums, __builtin_convertvector(whole, V) * scale);
    for (int u = 0; u < count; u++) {
        memcpy(&units[u]->centre, centres + u, 4);
        memcpy(&units[u]->paired_centre, paired_centres + u, 4);
        units[u]->scale = scales[u];
        units[u]->sum = sums[u];
    }
}

#else

// Columns are multiplied as they are: only their sum is asked for.
static void prepare_some(const float* const (&x)[LANES], FactorUnit* const (&units)[LANES], int count, bool) {
    for (int u = 0; u < count; u++) {
        V sum = load(x[u]);
        for (int at = LANES; at < UNIT; at += LANES) sum += load(x[u] + at);
        units[u]->sum = fold(sum);
    }
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

static void prepare_rows(const Factors& factors, Asked asked, int64_t begin, int64_t end, FactorUnit* units) {
    const float* x[LANES];
    FactorUnit* to[LANES];
    int count = 0;
    for (int64_t t = begin; t < end; t++)
        for (int64_t u = 0; u < factors.num_units; u++) {
            x[count] = factors.x + t * factors.stride + u * UNIT;
            to[count] = units + t * factors.num_units + u;
            if (++count < LANES && (t < end - 1 || u < factors.num_units - 1)) continue;
            prepare_some(x, to, count, asked.has_offsets);
            count = 0;
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
