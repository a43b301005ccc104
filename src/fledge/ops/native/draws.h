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

#include "scores.h"

struct Draw {
    double temperature;  // 0 for the best token
    double top_p, min_p;
    int64_t top_k;
    uint64_t seed;
    int64_t position;  // tokens said before
};

namespace {

constexpr int64_t UNSURE = -2;
constexpr double TOO_NEAR = 1e-9;
constexpr double MOST_NOISE = 36.8, LEAST_NOISE = -3.7;
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
