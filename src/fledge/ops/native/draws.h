// One token of a row of logits, drawn as `ops/sampling.py` draws it: temperature, top-k, top-p, min-p,
// then the largest score with noise added. The same token, without sorting and almost without
// logarithms:
//
// - Noise above x takes a uniform number above 1 - e^-x, so a token whose bits are too low for the
//   best value so far is passed over before a logarithm is taken.
// - What the filters keep ranks above what they drop. So the winner among all tokens is the winner
//   among those kept, if it is one of them; if not, neither is anything that ranks below it, and the
//   search goes on among those above. One count and one sum tell whether a token is kept.
//
// Sums and logarithms are not those of torch bit by bit. Where a decision is nearer than `TOO_NEAR`, far
// more than they can differ, the answer is that nobody knows, and the caller asks the twin.
#pragma once

#include "products.h"
#include "simd.h"

#include <algorithm>
#include <functional>
#include <vector>

struct Draw {
    double temperature;  // 0 for the best token
    double top_p, min_p;
    int64_t top_k;
    uint64_t seed;
    int64_t position;  // tokens said before
};

namespace {

typedef double D4 __attribute__((vector_size(32)));
typedef int64_t I4 __attribute__((vector_size(32)));

constexpr int64_t UNSURE = -2;
constexpr double TOO_NEAR = 1e-9;
constexpr double MOST_NOISE = 36.8, LEAST_NOISE = -3.7;
constexpr double ROUGHLY = 1e-3;
constexpr double REACH = 45.0;  // scores so far below the best can neither win nor weigh anything
constexpr uint64_t GOLDEN = 0x9E3779B97F4A7C15u;

INLINE uint64_t mix(uint64_t bits) {
    bits = (bits ^ bits >> 30) * 0xBF58476D1CE4E5B9u;
    bits = (bits ^ bits >> 27) * 0x94D049BB133111EBu;
    return bits ^ bits >> 31;
}

// The noise of all tokens at one position.
struct Noise {
    uint64_t base;

    Noise(uint64_t seed, int64_t position)
        : base(mix(mix(seed + GOLDEN) + GOLDEN * (uint64_t(position) + 1))) {}
    uint64_t bits(int64_t token) const { return mix(base + GOLDEN * (uint64_t(token) + 1)); }
    double of(int64_t token) const {
        double uniform = (double(bits(token) >> 12) + 0.5) * 0x1p-52;
        return -std::log(-std::log(uniform));
    }
};

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

// The largest value of some tokens, score and noise, and the next largest.
struct Drawn {
    double value, second;
    int64_t index;

    void add(double other, int64_t other_index) {
        if (other > value) {
            second = value;
            value = other;
            index = other_index;
        } else if (other > second) {
            second = other;
        }
    }
    void add(const Drawn& other) {
        add(other.value, other.index);
        second = other.second > second ? other.second : second;
    }
};

constexpr Drawn NOTHING_DRAWN = {-INFINITY, -INFINITY, -1};

// What is drawn among the tokens above a mark, one of which has at least the value `sure`.
static Drawn draw_among(const float* row, Share columns, const Scale& scale, const Noise& noise,
                        Mark mark, double sure) {
    Drawn found = NOTHING_DRAWN;
    // Too large a score is let through: the exact one is looked at then.
    float factor = scale.factor(), best = float(scale.best);
    float least_logit = scale.limit(mark.score), to_beat = float(sure);
    auto consider = [&](int64_t i) {
        double score = scale.of(row[i]);
        if (!mark.is_below(score, i)) return;
        found.add(score + noise.of(i), i);
        if (found.value > to_beat) to_beat = float(found.value);
    };
    int64_t i = columns.begin;
    for (; i + LANES <= columns.end; i += LANES) {
        V logits = load(row + i), score = (logits - best) * factor;
        VI is_near = (score > to_beat - float(MOST_NOISE)) & (logits >= least_logit);
        if (!any_true(is_near)) continue;
        // How far the uniform numbers are below 1: the bits of a float are its logarithm, at most.
        VI below;
        for (int lane = 0; lane < LANES; lane++) below[lane] = int32_t(~noise.bits(i + lane) >> 33);
        VI bits = (VI)__builtin_convertvector(below, V);
        V logarithm = __builtin_convertvector(bits, V) * 0x1p-23f - (127.0f + 31.0f);
        VI is_in = logarithm <= (score - to_beat) * 1.44269504f + 0.01f;
        if (!any_true(is_in)) continue;
        for (int lane = 0; lane < LANES; lane++)
            if (is_in[lane]) consider(i + lane);
    }
    for (; i < columns.end; i++) consider(i);
    return found;
}

// What decides over a row.
struct Choice {
    const float* row;
    int64_t count;
    Scale scale;
    const Draw& draw;
    double total;  // weight of the tokens that top-p is about, where there is one
    bool is_rough;
};

enum class Kept { NO, YES, UNSURE };

Kept is_kept(Choice& choice, Mark mark) {
    const Draw& draw = choice.draw;
    if (draw.min_p > 0.0 && mark.score < 0.0) {
        double above = mark.score - std::log(draw.min_p);
        if (std::fabs(above) < TOO_NEAR) return Kept::UNSURE;
        if (above < 0.0) return Kept::NO;
    }
    if (draw.top_k == 0 && draw.top_p >= 1.0) return Kept::YES;
    Standing standing = standing_of(choice.row, choice.count, choice.scale, mark);
    if (draw.top_k > 0 && standing.num_better >= draw.top_k) return Kept::NO;
    if (draw.top_p >= 1.0 || standing.weight == 0.0) return Kept::YES;
    double share = standing.weight / choice.total;
    if (choice.is_rough && std::fabs(share - draw.top_p) < 2.0 * ROUGHLY) {
        choice.total = weight_of(choice.row, choice.count, choice.scale, -INFINITY);
        choice.is_rough = false;
        share = standing.weight / choice.total;
    }
    if (std::fabs(share - draw.top_p) < TOO_NEAR) return Kept::UNSURE;
    return share < draw.top_p ? Kept::YES : Kept::NO;
}

// The token of a row, once the largest of all its values is known, and about the weight of all its
// tokens where there is a top-p.
static int64_t choose_token(Choice choice, const Noise& noise, Drawn drawn) {
    const Draw& draw = choice.draw;
    if (draw.top_p < 1.0 && draw.top_k > 0) {
        double least = score_of_kth(choice.row, choice.count, choice.scale, draw.top_k);
        choice.total = weight_of(choice.row, choice.count, choice.scale, least);
        choice.is_rough = false;
    }
    for (;;) {
        if (drawn.index < 0 || drawn.value - drawn.second < TOO_NEAR) return UNSURE;
        Mark mark = {choice.scale.of(choice.row[drawn.index]), drawn.index};
        Kept kept = is_kept(choice, mark);
        if (kept == Kept::UNSURE) return UNSURE;
        if (kept == Kept::YES) return drawn.index;
        // The best token is among those above, whatever its noise.
        drawn = draw_among(choice.row, Share{0, choice.count}, choice.scale, noise, mark,
                           LEAST_NOISE);
    }
}

}  // namespace
