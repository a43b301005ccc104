// Scores of a row of logits, in float64 and against the best, and what ranks above what: counts and
// weights of the tokens from some score on, without sorting them.
#pragma once

#include "products.h"
#include "simd.h"

#include <algorithm>
#include <vector>

namespace {

typedef double D4 __attribute__((vector_size(32)));
typedef int64_t I4 __attribute__((vector_size(32)));

constexpr double ROUGHLY = 1e-3;
constexpr double REACH = 45.0;  // scores so far below the best can neither win nor weigh anything

// e^x to about one unit in the last place, for x from -700 to 0; next to nothing below.
INLINE D4 fine_exponential(D4 x) {
    D4 least = D4{} - 700.0, magic = D4{} + 6755399441055744.0;
    x = x > least ? x : least;
    D4 shifted = x * 1.44269504088896340736 + magic;
    D4 n = shifted - magic;
    D4 r = x - n * 6.93147180369123816490e-01;
    r = r - n * 1.90821492927058770002e-10;
    D4 p = D4{} + 1.0 / 6227020800.0;
    const double terms[] = {1.0 / 479001600.0, 1.0 / 39916800.0, 1.0 / 3628800.0, 1.0 / 362880.0,
                            1.0 / 40320.0,     1.0 / 5040.0,     1.0 / 720.0,     1.0 / 120.0,
                            1.0 / 24.0,        1.0 / 6.0,        0.5,             1.0,
                            1.0};
    for (double term : terms) p = p * r + term;
    // The whole number is in the lowest bits of what the magic number made of it.
    I4 scale = ((I4)shifted + 1023) << 52;
    return p * (D4)scale;
}

// How logits become scores: those of the best are 0.
struct Scale {
    double best, temperature;

    double of(float logit) const { return (double(logit) - best) / temperature; }
    D4 of_four(const float* logits) const {
        V4 four = *(const UnalignedV4*)logits;
        return (__builtin_convertvector(four, D4) - best) / temperature;
    }
    float factor() const { return float(1.0 / temperature); }
    // Whether floats can tell roughly what scores are.
    bool is_usual() const { return temperature > 1e-20 && temperature < 1e20; }
    // A logit below which no score is as large as this one.
    float limit(double score) const {
        double logit = best + score * temperature;
        double room = 1e-6 * (std::fabs(best) + std::fabs(logit)) + 1e-30;
        return logit - room > -3e38 ? float(logit - room) : -INFINITY;
    }
};

INLINE bool any_true(VI lanes) {
#if HAS_WIDE
    return _mm512_test_epi32_mask((__m512i)lanes, (__m512i)lanes) != 0;
#elif defined(__AVX2__)
    return _mm256_movemask_epi8((__m256i)lanes) != 0;
#else
    return !all_true(~lanes);
#endif
}

// Calls `four` for every four logits of which one may be as large as a limit, and `one` for the last.
template <typename Four, typename One>
void above(const float* row, Share columns, float limit, Four four, One one) {
    int64_t i = columns.begin;
    for (; i + LANES <= columns.end; i += LANES)
        if (any_true(load(row + i) >= limit))
            for (int64_t j = i; j < i + LANES; j += 4) four(j);
    for (; i < columns.end; i++) one(i);
}

// A token that others are compared with: those of a larger score rank above it, and of as large ones
// those with higher numbers.
struct Mark {
    double score;
    int64_t index;

    bool is_below(double other, int64_t other_index) const {
        return other > score || (other == score && other_index > index);
    }
};

constexpr Mark BELOW_ALL = {-INFINITY, -1};

struct Standing {
    int64_t num_better;  // tokens of larger scores
    double weight;       // of all that rank above it
};

static Standing standing_of(const float* row, int64_t count, const Scale& scale, Mark mark) {
    D4 weight = {};
    I4 better = {}, lanes = {0, 1, 2, 3};
    Standing found = {};
    above(
        row, Share{0, count}, scale.limit(mark.score),
        [&](int64_t i) {
            D4 score = scale.of_four(row + i);
            I4 is_better = score > mark.score;
            I4 is_above = is_better | ((score == mark.score) & (lanes + i > mark.index));
            better -= is_better;
            weight += (D4)((I4)fine_exponential(score) & is_above);
        },
        [&](int64_t i) {
            double score = scale.of(row[i]);
            found.num_better += score > mark.score;
            if (mark.is_below(score, i)) found.weight += std::exp(score);
        });
    for (int lane = 0; lane < 4; lane++) {
        found.num_better += better[lane];
        found.weight += weight[lane];
    }
    return found;
}

// The weight of the tokens whose scores are at least so large.
static double weight_of(const float* row, int64_t count, const Scale& scale, double least) {
    D4 weights = {};
    double weight = 0.0;
    above(
        row, Share{0, count}, scale.limit(least > -REACH ? least : -REACH),
        [&](int64_t i) {
            D4 score = scale.of_four(row + i);
            weights += (D4)((I4)fine_exponential(score) & (score >= least));
        },
        [&](int64_t i) {
            double score = scale.of(row[i]);
            if (score >= least) weight += std::exp(score);
        });
    return weight + weights[0] + weights[1] + weights[2] + weights[3];
}

// The weight of some tokens, nearly: within `ROUGHLY` of it.
static double rough_weight(const float* row, Share columns, const Scale& scale) {
    float best = float(scale.best), factor = scale.factor();
    double weight = 0.0;
    int64_t i = columns.begin;
    while (i + LANES <= columns.end) {
        V sum = {};
        for (int n = 0; n < 64 && i + LANES <= columns.end; n++, i += LANES)
            sum += exponential((load(row + i) - best) * factor);
        weight += fold(sum);
    }
    for (; i < columns.end; i++) weight += std::exp(scale.of(row[i]));
    return weight;
}

// The logits of a row from some limit on, with their numbers: at least as many as asked for, unless
// there are fewer within reach.
struct Ranked {
    float logit;
    int64_t index;
};

static void gather_best(const float* row, int64_t count, const Scale& scale, int64_t wanted,
                        std::vector<Ranked>& found) {
    for (double reach = 3.0;; reach *= 2.0) {
        found.clear();
        float limit = scale.limit(-reach);
        auto take = [&](int64_t i) {
            if (row[i] >= limit) found.push_back({row[i], i});
        };
        auto take_four = [&](int64_t i) {
            for (int64_t j = i; j < i + 4; j++) take(j);
        };
        above(row, Share{0, count}, limit, take_four, take);
        if (int64_t(found.size()) >= wanted || reach > REACH) return;
    }
}

INLINE bool ranks_before(const Ranked& one, const Ranked& other) {
    return one.logit > other.logit || (one.logit == other.logit && one.index < other.index);
}

// The score of the k-th best token; nothing where there are not so many within reach.
static double score_of_kth(const float* row, int64_t count, const Scale& scale, int64_t k) {
    static thread_local std::vector<Ranked> found;
    gather_best(row, count, scale, k, found);
    if (int64_t(found.size()) < k) return -INFINITY;
    std::nth_element(found.begin(), found.begin() + (k - 1), found.end(), ranks_before);
    return scale.of(found[size_t(k - 1)].logit);
}

}  // namespace
