// Attention over paged memory. All in float32; every row and head is computed by itself, so its bits do not
// depend on the others. Heads that see the same keys may load them together.
#pragma once

#include "layers.h"

INLINE float dot(const float* a, const float* b, int64_t size) {
    V sum = {};
    int64_t i = 0;
    for (; i + LANES <= size; i += LANES) sum += load(a + i) * load(b + i);
    if (i < size) sum += load_some(a + i, size - i) * load_some(b + i, size - i);
    return fold(sum);
}

constexpr int MOST_HEADS = HAS_WIDE ? 3 : 1;  // that registers hold at once

// Scores of Q heads, whose queries lie side by side; those of the next head are `longest` further.
template <int PARTS, int Q>
static void score_keys(const float* query, const float* keys, int64_t stride, const int32_t* slots,
                       int64_t count, float* scores, int64_t longest) {
    V own[Q][PARTS];
#pragma GCC unroll 4
    for (int q = 0; q < Q; q++)
#pragma GCC unroll 16
        for (int p = 0; p < PARTS; p++) own[q][p] = load(query + (q * PARTS + p) * LANES);
    int64_t i = 0;
    for (; i + 4 <= count; i += 4) {
        V sums[Q][4] = {};
#pragma GCC unroll 4
        for (int j = 0; j < 4; j++) {
            const float* key = keys + slots[i + j] * stride;
#pragma GCC unroll 16
            for (int p = 0; p < PARTS; p++) {
                V part = load(key + p * LANES);
#pragma GCC unroll 4
                for (int q = 0; q < Q; q++) sums[q][j] += own[q][p] * part;
            }
        }
#pragma GCC unroll 4
        for (int q = 0; q < Q; q++)
            *(UnalignedV4*)(scores + q * longest + i) = fold4(sums[q][0], sums[q][1], sums[q][2], sums[q][3]);
    }
    for (; i < count; i++) {
        const float* key = keys + slots[i] * stride;
#pragma GCC unroll 4
        for (int q = 0; q < Q; q++) {
            V sum = {};
#pragma GCC unroll 16
            for (int p = 0; p < PARTS; p++) sum += own[q][p] * load(key + p * LANES);
            scores[q * longest + i] = fold(sum);
        }
    }
}

template <int PARTS, int Q>
static void mix_values(const float* probs, int64_t longest, const float* values, int64_t stride,
                       const int32_t* slots, int64_t count, const float* scales, float* out) {
    V sums[Q][PARTS] = {};
    for (int64_t i = 0; i < count; i++) {
        const float* value = values + slots[i] * stride;
#pragma GCC unroll 16
        for (int p = 0; p < PARTS; p++) {
            V part = load(value + p * LANES);
#pragma GCC unroll 4
            for (int q = 0; q < Q; q++) sums[q][p] += part * probs[q * longest + i];
        }
    }
#pragma GCC unroll 4
    for (int q = 0; q < Q; q++)
#pragma GCC unroll 16
        for (int p = 0; p < PARTS; p++) store(out + (q * PARTS + p) * LANES, sums[q][p] * scales[q]);
}

// Scores to numbers that are proportional to probabilities; returns the sum of them.
static float exponentials(float* scores, int64_t count, float scale, float soft_cap) {
    V tops = all_of(-INFINITY);
    VI are_good = ~VI{};
    int64_t i = 0;
    for (; i + LANES <= count; i += LANES) {
        V score = load(scores + i) * scale;
        if (soft_cap > 0.0f)
            for (int lane = 0; lane < LANES; lane++)
                score[lane] = soft_cap * std::tanh(score[lane] / soft_cap);
        store(scores + i, score);
        tops = larger_of(score, tops);
        are_good &= score < INFINITY;
    }
    float top = largest(tops);
    bool is_bad = !all_true(are_good);
    for (; i < count; i++) {
        float score = scores[i] * scale;
        if (soft_cap > 0.0f) score = soft_cap * std::tanh(score / soft_cap);
        scores[i] = score;
        top = score > top ? score : top;
        is_bad |= !(score < INFINITY);
    }
    V sum = {};
    i = 0;
    for (; i + LANES <= count; i += LANES) {
        V probs = exponential(load(scores + i) - top);
        store(scores + i, probs);
        sum += probs;
    }
    if (i < count) {
        float rest[LANES];
        store(rest, exponential(load_some(scores + i, count - i) - top));
        memcpy(scores + i, rest, size_t(count - i) * sizeof(float));
        sum += load_some(rest, count - i);
    }
    return is_bad ? NAN : fold(sum);
}

struct Heads {
    int64_t num_heads, num_kv_heads, size;
    float scale, soft_cap;
};

// What some heads of one row look at: the keys at `slots`, of which there is at least its own.
struct Sight {
    const float *keys, *values;
    int64_t stride;
    const int32_t* slots;
    int64_t count;
    float* scores;  // [heads at once, longest]
    int64_t longest;
};

template <int PARTS, int Q>
static void attend_at_once(const Heads& heads, const float* query, const Sight& sight, float* out) {
    float scales[Q];
    score_keys<PARTS, Q>(query, sight.keys, sight.stride, sight.slots, sight.count, sight.scores, sight.longest);
    for (int q = 0; q < Q; q++)
        scales[q] = 1.0f / exponentials(sight.scores + q * sight.longest, sight.count, heads.scale,
                                        heads.soft_cap);
    mix_values<PARTS, Q>(sight.scores, sight.longest, sight.values, sight.stride, sight.slots, sight.count,
                         scales, out);
}

// One head of any size.
static void attend_alone(const Heads& heads, const float* query, const Sight& sight, float* out) {
    int64_t size = heads.size;
    for (int64_t i = 0; i < sight.count; i++)
        sight.scores[i] = dot(query, sight.keys + sight.slots[i] * sight.stride, size);
    float scale = 1.0f / exponentials(sight.scores, sight.count, heads.scale, heads.soft_cap);
    for (int64_t d = 0; d < size; d++) out[d] = 0.0f;
    for (int64_t i = 0; i < sight.count; i++) {
        const float* value = sight.values + sight.slots[i] * sight.stride;
        float prob = sight.scores[i] * scale;
        for (int64_t d = 0; d < size; d++) out[d] += value[d] * prob;
    }
}

// Some heads of one row that see the same keys, as many at once as there can be; returns how many those were.
static int64_t attend(const Heads& heads, const float* query, int64_t num_heads, const Sight& sight, float* out) {
    if (heads.size == 64) {
        if (MOST_HEADS >= 3 && num_heads >= 3 && num_heads != 4)
            return attend_at_once<64 / LANES, MOST_HEADS>(heads, query, sight, out), MOST_HEADS;
        if (MOST_HEADS >= 2 && num_heads >= 2)
            return attend_at_once<64 / LANES, MOST_HEADS < 2 ? 1 : 2>(heads, query, sight, out), 2;
        attend_at_once<64 / LANES, 1>(heads, query, sight, out);
    } else if (heads.size == 128) {
        attend_at_once<128 / LANES, 1>(heads, query, sight, out);
    } else {
        attend_alone(heads, query, sight, out);
    }
    return 1;
}
