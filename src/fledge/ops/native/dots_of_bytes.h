// Bytes times bytes, summed up as whole numbers, where processors can; and codes as bytes.
#pragma once

#include "columns.h"

#if HAS_BYTE_DOTS

// Four bytes in each lane.
typedef VI Bytes;

INLINE Bytes load_bytes(const uint8_t* p) { return *(const Bytes*)p; }
INLINE Bytes lower_halves(Bytes b) { return b & 0x0f0f0f0f; }
INLINE Bytes upper_halves(Bytes b) { return lower_halves(b >> 4); }
INLINE Bytes to_all_lanes(int32_t bytes) { return Bytes{} + bytes; }

// Sums with four products added to each; codes have no sign, digits have one.
INLINE VI with_dot(VI sum, Bytes codes, Bytes digits) {
#if HAS_WIDE
    return (VI)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)codes, (__m512i)digits);
#else
    return (VI)_mm256_dpbusd_avx_epi32((__m256i)sum, (__m256i)codes, (__m256i)digits);
#endif
}

constexpr int UNIT_WORDS = UNIT / 4;

INLINE void unpack_codes(const FourBits<true>&, const uint8_t* codes, Bytes (&words)[UNIT_WORDS]) {
#pragma GCC unroll 4
    for (int i = 0; i < UNIT_WORDS / 2; i++) {
        Bytes both = load_bytes(codes + 4 * LANES * i);
        words[2 * i] = lower_halves(both);
        words[2 * i + 1] = upper_halves(both);
    }
}
INLINE void unpack_codes(const FourBits<false>&, const uint8_t* codes, Bytes (&words)[UNIT_WORDS]) {
    unpack_codes(FourBits<true>{}, codes, words);
}
template <bool IS_FINE>
INLINE void unpack_codes(const EightBits<IS_FINE>&, const uint8_t* codes, Bytes (&words)[UNIT_WORDS]) {
#pragma GCC unroll 8
    for (int i = 0; i < UNIT_WORDS; i++) words[i] = load_bytes(codes + 4 * LANES * i);
}

#endif
