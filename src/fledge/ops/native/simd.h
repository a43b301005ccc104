// One register of floats at a time, in the vector types that GCC and Clang share: sixteen with
// AVX-512, eight elsewhere. Wider vectors than the processor's are taken apart by the compiler, float
// by float where it has to shuffle or convert them. Sums of a row never depend on which other rows
// are beside it: every kernel adds lane by lane over rising k, and folds the lanes by the same tree.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#if defined(__AVX512F__) || defined(__F16C__) || defined(__AVX2__)
#include <immintrin.h>
#endif

#if defined(__AVX512F__) && defined(__AVX512BW__)
#define HAS_WIDE 1
constexpr int LANES = 16;
#else
#define HAS_WIDE 0
constexpr int LANES = 8;
#endif

typedef float V __attribute__((vector_size(4 * LANES)));
typedef float UnalignedV __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef int32_t VI __attribute__((vector_size(4 * LANES)));
typedef float V8 __attribute__((vector_size(32)));
typedef float V4 __attribute__((vector_size(16)));
typedef float UnalignedV4 __attribute__((vector_size(16), aligned(4), may_alias));

#define INLINE static inline __attribute__((always_inline))

INLINE V load(const float* p) { return *(const UnalignedV*)p; }
// A vector that stays in its register until it was used for the last time: the compiler may think that
// loading it again with every use is as cheap.
INLINE V held(V v) {
#if HAS_WIDE
    asm("" : "+v"(v));
#elif defined(__AVX__)  // else no register holds one
    asm("" : "+x"(v));
#endif
    return v;
}
INLINE void store(float* p, V v) { *(UnalignedV*)p = v; }
INLINE V all_of(float x) { return V{} + x; }

// One float in all lanes, straight from memory.
INLINE V load_to_all(const float* p) {
#if defined(__AVX2__) && !HAS_WIDE
    return (V)_mm256_broadcast_ss(p);
#else
    return all_of(*p);
#endif
}

INLINE V load_some(const float* p, int64_t count) {
    float lanes[LANES] = {};
    memcpy(lanes, p, size_t(count) * sizeof(float));
    return load(lanes);
}

#if HAS_WIDE
INLINE V8 half_sums(V v) {
    V8 low = __builtin_shufflevector(v, v, 0, 1, 2, 3, 4, 5, 6, 7);
    V8 high = __builtin_shufflevector(v, v, 8, 9, 10, 11, 12, 13, 14, 15);
    return low + high;
}

// In each quarter, two partial sums of one vector, then two of the other. One half of what is added
// stays in its place, so that only the other half has to be moved.
INLINE V pair_sums(V a, V b) {
    V stay = __builtin_shufflevector(a, b, 0, 1, 18, 19, 4, 5, 22, 23, 8, 9, 26, 27, 12, 13, 30, 31);
    V moved = __builtin_shufflevector(a, b, 2, 3, 16, 17, 6, 7, 20, 21, 10, 11, 24, 25, 14, 15, 28, 29);
    return stay + moved;
}

// In each quarter, one partial sum of each of four vectors.
INLINE V quarter_sums(V a, V b, V c, V d) {
    V ab = pair_sums(a, b), cd = pair_sums(c, d);
    V even = __builtin_shufflevector(ab, cd, 0, 2, 16, 18, 4, 6, 20, 22, 8, 10, 24, 26, 12, 14, 28, 30);
    V odd = __builtin_shufflevector(ab, cd, 1, 3, 17, 19, 5, 7, 21, 23, 9, 11, 25, 27, 13, 15, 29, 31);
    return even + odd;
}

// The sums of four vectors, side by side.
INLINE V4 fold4(V a, V b, V c, V d) {
    V8 halves = half_sums(quarter_sums(a, b, c, d));
    return __builtin_shufflevector(halves, halves, 0, 1, 2, 3) +
           __builtin_shufflevector(halves, halves, 4, 5, 6, 7);
}

// Four quarter sums to the sums that `fold4` gives of each, one quarter after the other.
INLINE V fold_quarters(V a, V b, V c, V d) {
    auto halves = [](V one, V other) {
        V stay = __builtin_shufflevector(one, other, 0, 1, 2, 3, 4, 5, 6, 7, 24, 25, 26, 27, 28, 29, 30, 31);
        V moved = __builtin_shufflevector(one, other, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21, 22, 23);
        return stay + moved;
    };
    V ab = halves(a, b), cd = halves(c, d);
    return __builtin_shufflevector(ab, cd, 0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27) +
           __builtin_shufflevector(ab, cd, 4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23, 28, 29, 30, 31);
}
#else
// In each half, two partial sums of one vector, then two of the other. One half of what is added
// stays in its place, so that only the other half has to be moved.
INLINE V pair_sums(V a, V b) {
    V stay = __builtin_shufflevector(a, b, 0, 1, 10, 11, 4, 5, 14, 15);
    V moved = __builtin_shufflevector(a, b, 2, 3, 8, 9, 6, 7, 12, 13);
    return stay + moved;
}

// The sums of four vectors, side by side.
INLINE V4 fold4(V a, V b, V c, V d) {
    V ab = pair_sums(a, b), cd = pair_sums(c, d);
    V even = __builtin_shufflevector(ab, cd, 0, 2, 8, 10, 4, 6, 12, 14);
    V odd = __builtin_shufflevector(ab, cd, 1, 3, 9, 11, 5, 7, 13, 15);
    V halves = even + odd;
    return __builtin_shufflevector(halves, halves, 0, 1, 2, 3) +
           __builtin_shufflevector(halves, halves, 4, 5, 6, 7);
}
#endif

INLINE float fold(V v) {
    V none = {};
    return fold4(v, none, none, none)[0];
}

// All lanes as one, two at a time.
template <typename Number, typename Vector, typename Join> INLINE Number join_lanes(Vector v, Join join) {
    typedef Number Eight __attribute__((vector_size(32)));
    typedef Number Four __attribute__((vector_size(16)));
#if HAS_WIDE
    Eight eight = join(__builtin_shufflevector(v, v, 0, 1, 2, 3, 4, 5, 6, 7),
                     __builtin_shufflevector(v, v, 8, 9, 10, 11, 12, 13, 14, 15));
#else
    Eight eight = v;
#endif
    Four four = join(__builtin_shufflevector(eight, eight, 0, 1, 2, 3),
                    __builtin_shufflevector(eight, eight, 4, 5, 6, 7));
    four = join(four, __builtin_shufflevector(four, four, 2, 3, 0, 1));
    four = join(four, __builtin_shufflevector(four, four, 1, 0, 3, 2));
    return four[0];
}

// Lanes of two vectors that stand at even places, or at odd ones.
template <bool IS_ODD> INLINE VI half_of_lanes(VI a, VI b) {
#if HAS_WIDE
    return IS_ODD ? __builtin_shufflevector(a, b, 1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31)
                  : __builtin_shufflevector(a, b, 0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
#else
    return IS_ODD ? __builtin_shufflevector(a, b, 1, 3, 5, 7, 9, 11, 13, 15)
                  : __builtin_shufflevector(a, b, 0, 2, 4, 6, 8, 10, 12, 14);
#endif
}

// All lanes of each of some vectors as one, side by side: a third of what `join_lanes` takes for each.
template <typename Join> INLINE VI join_each(VI (&vectors)[LANES], Join join) {
#pragma GCC unroll 4
    for (int count = LANES / 2; count > 0; count /= 2)
#pragma GCC unroll 8
        for (int i = 0; i < count; i++) {
            VI one = vectors[2 * i], other = vectors[2 * i + 1];
            vectors[i] = join(half_of_lanes<false>(one, other), half_of_lanes<true>(one, other));
        }
    return vectors[0];
}

INLINE bool all_true(VI lanes) {
#if HAS_WIDE
    return _mm512_test_epi32_mask((__m512i)lanes, (__m512i)lanes) == 0xffff;
#else
    return join_lanes<int32_t>(lanes, [](auto a, auto b) { return a & b; }) != 0;
#endif
}

INLINE float largest(V v) {
    return join_lanes<float>(v, [](auto a, auto b) { return a > b ? a : b; });
}

INLINE V smaller_of(V a, V b) { return a < b ? a : b; }
INLINE V larger_of(V a, V b) { return a > b ? a : b; }

// e^x to about one unit in the last place, for x up to 88; 0 far below.
INLINE V exponential(V x) {
    x = larger_of(smaller_of(x, all_of(88.0f)), all_of(-87.0f));
    V magic = all_of(12582912.0f);
    V n = (x * 1.44269504088896341f + magic) - magic;
    V r = x - n * 0.693359375f;
    r = r - n * -2.12194440e-4f;
    V p = all_of(1.9875691500e-4f);
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    VI scale = (__builtin_convertvector(n, VI) + 127) << 23;
    return p * (V)scale;
}

INLINE float half_to_float(uint16_t bits) {
#if defined(__F16C__)
    return _cvtsh_ss(bits);
#else
    uint32_t sign = uint32_t(bits & 0x8000u) << 16, exponent = (bits >> 10) & 31u, rest = bits & 1023u;
    if (exponent == 0) {
        float tiny = float(rest) * 5.9604644775390625e-8f;
        return sign ? -tiny : tiny;
    }
    uint32_t wide = sign | (exponent == 31 ? 255u : exponent + 112u) << 23 | rest << 13;
    float out;
    memcpy(&out, &wide, 4);
    return out;
#endif
}

// Signed bytes to floats.
INLINE V bytes_to_floats(const uint8_t* bytes) {
#if HAS_WIDE
    __m128i packed = _mm_loadu_si128((const __m128i*)bytes);
    return (V)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(packed));
#elif defined(__AVX2__)
    __m128i packed = _mm_loadl_epi64((const __m128i*)bytes);
    return (V)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(packed));
#else
    VI wide;
    for (int lane = 0; lane < LANES; lane++) wide[lane] = ((const int8_t*)bytes)[lane];
    return __builtin_convertvector(wide, V);
#endif
}

// bfloat16 to floats.
INLINE V brains_to_floats(const uint8_t* brains) {
#if HAS_WIDE
    __m256i packed = _mm256_loadu_si256((const __m256i*)brains);
    return (V)_mm512_slli_epi32(_mm512_cvtepu16_epi32(packed), 16);
#elif defined(__AVX2__)
    __m128i packed = _mm_loadu_si128((const __m128i*)brains);
    return (V)_mm256_slli_epi32(_mm256_cvtepu16_epi32(packed), 16);
#else
    VI wide;
    for (int lane = 0; lane < LANES; lane++)
        wide[lane] = int32_t(uint32_t(((const uint16_t*)brains)[lane]) << 16);
    return (V)wide;
#endif
}
