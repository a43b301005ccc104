// Logits of rounded rows, the highest of which are made anew of the rows as they are: where tokens
// are nearly as probable as each other, rounding would decide between them.
// `models/native_head.py` has the twin.
#pragma once

#include "best.h"
#include "scores.h"

namespace {

constexpr int64_t MOST_SHARPENED = 8;

// `rows` are unrounded, [count, size]; the logits are changed, and their best is given anew.
static Best sharpen(float* logits, int64_t count, const Best& best, const float* rows,
                    const float* x, int64_t size) {
    static thread_local std::vector<Ranked> found;
    gather_best(logits, count, Scale{best.value, 1.0}, 1, found);
    if (found.size() == 1) return best;
    int64_t num = std::min(int64_t(found.size()), MOST_SHARPENED);
    std::partial_sort(found.begin(), found.begin() + num, found.end(), ranks_before);
    float sum = best.sum;
    for (int64_t i = 0; i < num; i++) {
        Ranked& one = found[size_t(i)];
        sum -= std::exp(one.logit - best.value);
        logits[one.index] = one.logit = dot(rows + one.index * size, x, size);
        sum += std::exp(one.logit - best.value);
    }
    Ranked first = *std::min_element(found.begin(), found.end(), ranks_before);
    float own = std::exp(first.logit - best.value);
    return {first.logit, std::max(sum / own, 1.0f), first.index};
}

}  // namespace
