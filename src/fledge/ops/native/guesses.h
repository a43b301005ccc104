// A head's draft for a request above temperature 0: of its most probable tokens the one that is best
// under the noise that the target adds. `ops/noised_top.py` is the twin, and says why.
#pragma once

#include "draws.h"

namespace {

constexpr int64_t MOST_CANDIDATES = 64;
constexpr double LOWEST = -1e300;

// The numbers of the rule, which the twin says.
struct GuessRule {
    int64_t num_candidates;
    double dropped, scale;
};

struct Guess {
    int64_t index;
    float probability;  // that the target's own token is the same
};

// Scores of candidates, falling, under the filters of a request.
void filter_candidates(const Draw& draw, double dropped, double* scores, int64_t count) {
    auto is_beyond = [&](int64_t i) { return draw.top_k > 0 && i >= draw.top_k; };
    double total = 0.0, before = 0.0;
    for (int64_t i = 0; i < count && !is_beyond(i); i++) total += std::exp(scores[i]);
    for (int64_t i = 0; i < count; i++) {
        double weight = std::exp(scores[i]);
        bool is_behind = draw.top_p < 1.0 && before >= draw.top_p * total;
        bool is_dropped = is_beyond(i) || is_behind || weight < draw.min_p;
        if (!is_beyond(i)) before += weight;
        if (i > 0 && is_dropped) scores[i] -= dropped;
    }
}

// `draw` is for the first draft of a chain, and this one is `level` behind it.
static Guess guess_under_noise(const float* row, int64_t count, float best, const Draw& draw,
                               int64_t level, const int64_t* to_target, const GuessRule& rule) {
    static thread_local std::vector<Ranked> found;
    gather_best(row, count, Scale{best, 1.0}, rule.num_candidates, found);
    int64_t num = std::min({int64_t(found.size()), rule.num_candidates, MOST_CANDIDATES});
    std::partial_sort(found.begin(), found.begin() + num, found.end(), ranks_before);
    double values[MOST_CANDIDATES];
    Scale scale = {best, draw.temperature};
    for (int64_t i = 0; i < num; i++) values[i] = scale.of(found[size_t(i)].logit);
    filter_candidates(draw, rule.dropped, values, num);
    Noise noise(draw.seed, draw.position + level);
    int64_t chosen = 0;
    for (int64_t i = 0; i < num; i++) {
        values[i] = std::max(values[i] + noise.of(to_target[found[size_t(i)].index]), LOWEST);
        if (values[i] > values[chosen]) chosen = i;
    }
    double total = 0.0;
    for (int64_t i = 0; i < num; i++) total += std::exp((values[i] - values[chosen]) / rule.scale);
    return {found[size_t(chosen)].index, float(1.0 / total)};
}

}  // namespace
