// Finds few bits in floats that were made of few bits: for each group of columns a step (and a
// least value) and whole numbers that give back exactly the same floats. Where there are none the
// rows cannot be packed that way. Nothing needs to be known about the file they came from.
#pragma once

#include "products.h"

INLINE uint16_t float_to_half(float x) {
    uint32_t bits;
    memcpy(&bits, &x, 4);
    uint32_t sign = (bits >> 16) & 0x8000u, rest = bits & 0x7fffffffu;
    if (rest >= 0x477ff000u) return uint16_t(sign | 0x7c00u);
    if (rest < 0x38800000u) {
        // Below the normal halves they are evenly spaced.
        float steps = std::nearbyint(std::fabs(x) * 16777216.0f);
        return uint16_t(sign | uint32_t(steps));
    }
    rest += 0x0fffu + ((rest >> 13) & 1u);
    return uint16_t(sign | ((rest - 0x38000000u) >> 13));
}

INLINE float as_half(float x) { return half_to_float(float_to_half(x)); }

// The nearest number of so many significant bits.
INLINE float with_bits(float x, int num_bits) {
    uint32_t bits, dropped = uint32_t(24 - num_bits);
    memcpy(&bits, &x, 4);
    bits += (1u << (dropped - 1)) - 1u + ((bits >> dropped) & 1u);
    bits &= ~((1u << dropped) - 1u);
    memcpy(&x, &bits, 4);
    return x;
}

struct Group {
    float step, least;
    int32_t codes[UNIT];
};

constexpr float NEARLY = 0.02f;

INLINE bool fits_grid(const float* w, int count, float least, float steps_per) {
    for (int i = 0; i < count; i++) {
        float place = (w[i] - least) * steps_per;
        if (std::fabs(place - std::nearbyint(place)) > NEARLY) return false;
    }
    return true;
}

INLINE bool gives_back(const float* w, int count, Group& group, int lowest, int highest) {
    float per_step = group.step == 0.0f ? 0.0f : 1.0f / group.step;
    for (int i = 0; i < count; i++) {
        float code = std::nearbyint((w[i] - group.least) * per_step);
        if (!(code >= float(lowest) && code <= float(highest))) return false;
        if (std::fma(group.step, code, group.least) != w[i]) return false;
        group.codes[i] = int32_t(code);
    }
    return true;
}

// Whether the value of code 8 is a float: `pairs.h` counts from there.
INLINE bool has_centre(const Group& group) {
    double centre = 8.0 * double(group.step) + double(group.least);
    return double(float(centre)) == centre;
}

// w = step q + least with q from 0 to 15; step and least (the value of code 0) are halves, or products of a half and a
// number of six bits.
static bool find_four(const float* w, bool is_half, Group& group) {
    float low = w[0], high = w[0];
    for (int i = 1; i < UNIT; i++) {
        low = w[i] < low ? w[i] : low;
        high = w[i] > high ? w[i] : high;
    }
    auto rounded = [&](float x) { return is_half ? as_half(x) : with_bits(x, 17); };
    if (low == high) {
        group.step = 0.0f;
        group.least = rounded(low);
        return gives_back(w, UNIT, group, 0, 15);
    }
    // Nearly all groups use all codes.
    for (int turn = 0; turn < 15; turn++) {
        int num_steps = turn == 0 ? 15 : turn;
        if (!fits_grid(w, UNIT, low, float(num_steps) / (high - low))) continue;
        float step = rounded((high - low) / float(num_steps));
        for (int below = 0; below <= 15 - num_steps; below++)
            for (int sign = 1; sign >= -1; sign -= 2) {
                // Steps may go down: then codes count from the highest value.
                group.step = float(sign) * step;
                group.least = rounded((sign > 0 ? low : high) - float(below) * group.step);
                if (gives_back(w, UNIT, group, 0, 15) && (!is_half || has_centre(group))) return true;
            }
    }
    return false;
}

// w = step q with signed bytes q; the step is a half, or a half times a signed byte.
static bool find_eight(const float* w, int count, bool is_half, Group& group) {
    float most = 0.0f;
    for (int i = 0; i < count; i++) most = std::fabs(w[i]) > most ? std::fabs(w[i]) : most;
    group.step = group.least = 0.0f;
    if (most == 0.0f) return gives_back(w, count, group, 0, 0);
    for (int turn = 0; turn <= 128; turn++) {
        int largest = turn == 0 ? 127 : turn;
        if (!fits_grid(w, count, 0.0f, float(largest) / most)) continue;
        float step = most / float(largest);
        group.step = is_half ? as_half(step) : with_bits(step, 19);
        if (gives_back(w, count, group, -128, 127)) return true;
    }
    return false;
}

static void round_to_eight(const float* w, Group& group) {
    float most = 0.0f;
    for (int i = 0; i < UNIT; i++) most = std::fabs(w[i]) > most ? std::fabs(w[i]) : most;
    group.step = as_half(most / 127.0f);
    for (int i = 0; i < UNIT; i++) {
        float code = group.step > 0.0f ? std::nearbyint(w[i] / group.step) : 0.0f;
        group.codes[i] = int32_t(code > 127.0f ? 127.0f : code < -127.0f ? -127.0f : code);
    }
}

// The codes nearest to a group, and the sum of the squares of what they miss.
static float miss_four(const float* w, Group& group) {
    float per_step = group.step > 0.0f ? 1.0f / group.step : 0.0f, missed = 0.0f;
    for (int i = 0; i < UNIT; i++) {
        float code = std::nearbyint((w[i] - group.least) * per_step);
        code = code < 0.0f ? 0.0f : code > 15.0f ? 15.0f : code;
        group.codes[i] = int32_t(code);
        float miss = group.step * code + group.least - w[i];
        missed += miss * miss;
    }
    return missed;
}

// Sixteen values for a group that has more: between its ends, or a little inside of them.
static void round_to_four(const float* w, Group& best) {
    float low = w[0], high = w[0], least = INFINITY;
    for (int i = 1; i < UNIT; i++) {
        low = w[i] < low ? w[i] : low;
        high = w[i] > high ? w[i] : high;
    }
    for (int inside = 0; inside < 8; inside++) {
        Group group;
        float cut = 0.03f * float(inside) * (high - low);
        group.step = as_half((high - low - 2.0f * cut) / 15.0f);
        group.least = as_half(low + cut);
        float missed = miss_four(w, group);
        if (missed >= least) continue;
        least = missed;
        best = group;
    }
}

static bool pack_four(const float* const* rows, bool is_half, bool may_round, uint8_t* codes,
                      uint8_t* steps) {
    uint32_t packed[BLOCK * UNIT / 8] = {};
    float numbers[2 * BLOCK];
    for (int r = 0; r < BLOCK; r++) {
        Group group;
        if (may_round) round_to_four(rows[r], group);
        else if (!find_four(rows[r], is_half, group)) return false;
        for (int i = 0; i < UNIT; i++) place_four(packed, r, i, uint32_t(group.codes[i]));
        numbers[r] = group.step;
        numbers[BLOCK + r] = group.least;
    }
    memcpy(codes, packed, sizeof(packed));
    for (int i = 0; i < 2 * BLOCK; i++) {
        uint16_t half = float_to_half(numbers[i]);
        if (is_half) memcpy(steps + 2 * i, &half, 2);
        else memcpy(steps + 4 * i, numbers + i, 4);
    }
    return true;
}

static bool pack_eight(const float* const* rows, bool is_fine, bool may_round, uint8_t* codes,
                       uint8_t* steps) {
    int num_parts = is_fine ? 2 : 1, size = UNIT / num_parts;
    for (int r = 0; r < BLOCK; r++)
        for (int part = 0; part < num_parts; part++) {
            Group group;
            if (may_round) round_to_eight(rows[r], group);
            else if (!find_eight(rows[r] + part * size, size, !is_fine, group)) return false;
            for (int i = 0; i < size; i++)
                place_eight(codes, r, part * size + i, group.codes[i]);
            uint16_t half = float_to_half(group.step);
            int place = BLOCK * part + r;
            if (is_fine) memcpy(steps + 4 * place, &group.step, 4);
            else memcpy(steps + 2 * place, &half, 2);
        }
    return true;
}

static bool pack_brains(const float* const* rows, uint8_t* codes) {
    for (int r = 0; r < BLOCK; r++)
        for (int i = 0; i < UNIT; i++) {
            uint32_t bits;
            memcpy(&bits, rows[r] + i, 4);
            if (bits & 0xffffu) return false;
            place_brain(codes, r, i, uint16_t(bits >> 16));
        }
    return true;
}

// A block of rows in a format; false where it does not give back the same floats.
static bool pack_block(const float* rows, int64_t num_rows, int64_t num_columns, int format,
                       bool may_round, int64_t block, uint8_t* codes, uint8_t* steps) {
    static const float nothing[UNIT] = {};
    int64_t num_units = num_columns / UNIT;
    for (int64_t u = 0; u < num_units; u++) {
        const float* unit[BLOCK];
        for (int r = 0; r < BLOCK; r++) {
            int64_t row = block * BLOCK + r;
            unit[r] = row < num_rows ? rows + row * num_columns + u * UNIT : nothing;
        }
        int64_t at = place_of_unit(block, u, num_units);
        bool is_packed = false;
#define PACKED(FORMAT, pack)                                         \
    case FORMAT: {                                                   \
        uint8_t* own_codes = codes + at * Unit<FORMAT>::CODE_BYTES;  \
        uint8_t* own_steps = steps + at * Unit<FORMAT>::STEP_BYTES;  \
        (void)own_steps;                                             \
        is_packed = pack;                                            \
        break;                                                       \
    }
        switch (format) {
            PACKED(FOUR_HALF, pack_four(unit, true, may_round, own_codes, own_steps))
            PACKED(FOUR_FLOAT, pack_four(unit, false, false, own_codes, own_steps))
            PACKED(EIGHT_HALF, pack_eight(unit, false, may_round, own_codes, own_steps))
            PACKED(EIGHT_FINE, pack_eight(unit, true, false, own_codes, own_steps))
            PACKED(BRAIN, pack_brains(unit, own_codes))
        }
#undef PACKED
        if (!is_packed) return false;
    }
    return true;
}
