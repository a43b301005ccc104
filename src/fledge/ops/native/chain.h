// Chains of drafts: a head reads what was committed since its last turn, then goes on from its own
// best token, step by step, in one call. For requests above temperature 0 the best one is the best
// under the noise that the target will add.
#pragma once

#include "best.h"
#include "guesses.h"
#include "sharpen.h"

struct Chain {
    Rows rows;  // committed tokens that it has not read: a chain for each request, at least one
    View view;
    const int64_t* tokens;
    const float* embedding;  // [vocabulary, hidden]
    Norm embedding_norm, hidden_norm;
    int64_t keeps_normed;  // whether the normed hidden state is what attention is added to
    int64_t feeds_normed;  // whether the next step reads what is behind the final norm
    Matrix fuse;
    const float* features;  // [features, columns of fuse]: of committed tokens
    int64_t num_features;
    const int64_t* feature_slots;
    float* fused;  // [slots, hidden]
    Matrix to_logits;
    const float* unrounded;  // [draft tokens, hidden]: the rows that `to_logits` has rounded
    const int64_t* to_target;  // the target's token of each draft token
    int64_t depth;
    float least;          // a chain goes on while it is at least so probable
    const int64_t* copied;  // [requests]: first token of what may be copied instead, -1 for none
    const float* limits;    // [requests]: a first draft that differs must be as probable as this
    const Draw* draws;    // [requests], or missing where all are greedy
    GuessRule rule;
    int64_t* drafts;      // [requests, depth]
    float* probabilities;  // [requests, depth]: of each draft behind those before it
    int64_t* num_levels;
};

namespace {

struct ChainWork {
    Work work;
    Best* best;
    float *fused, *stream, *normed;
    float* logits;    // [requests, draft tokens]
    int64_t* newest;  // the token that each request goes on from
    float* path;      // how probable its chain is
    bool goes_on;
};

// Embedding of a token and the hidden state before it, each normed, side by side.
void join_input(const Chain& chain, const Work& work, int64_t t, int64_t token,
                const float* hidden) {
    int64_t size = work.hidden;
    float* to = work.input + t * 2 * size;
    norm_row(chain.embedding + token * size, chain.embedding_norm, chain.embedding_norm.weight,
             size, to);
    norm_row(hidden, chain.hidden_norm, chain.hidden_norm.weight, size, to + size);
}

const float* feature_before(const Chain& chain, const Work& work, int64_t t) {
    const Row& row = work.row[t];
    return chain.fused + slot_of(chain.view, row.request, row.number - 1) * work.hidden;
}

// Then `first` is read.
void fuse_features(Member& me, const Chain& chain, ChainWork& room, const Matrix& first) {
    int64_t count = chain.num_features, hidden = room.work.hidden;
    if (count == 0) return;
    OwnFactors factors(chain.fuse, chain.features, chain.fuse.num_columns, count, near_of_thread());
    Coming coming = begin_of(me, first);
    me.work(
        parts_of(me, chain.fuse),
        [&](int64_t part) { multiply_part(me, chain.fuse, factors.get(), room.fused, part, coming); },
        [&] {
            for (int64_t i = 0; i < count; i++)
                memcpy(chain.fused + chain.feature_slots[i] * hidden, room.fused + i * hidden,
                       size_t(hidden) * sizeof(float));
        });
}

// What the rows go on with: what they are added to, and what attention gave them.
void pick_newest(const Chain& chain, const Work& work, ChainWork& room, int64_t width, bool is_first) {
    int64_t hidden = work.hidden;
    for (int64_t b = 0; b < chain.rows.num_requests; b++) {
        int64_t t = is_first ? chain.rows.starts[b] + chain.rows.counts[b] - 1 : b;
        const float* before = is_first             ? feature_before(chain, work, t)
                              : chain.feeds_normed ? room.normed + b * hidden
                                                   : room.stream + b * hidden;
        const float* residual = chain.keeps_normed ? work.input + (2 * t + 1) * hidden : before;
        if (residual != room.stream + b * hidden)
            memcpy(room.stream + b * hidden, residual, size_t(hidden) * sizeof(float));
        memcpy(work.product + b * width, work.attended + t * width, size_t(width) * sizeof(float));
    }
}

// Whether a request goes on with what is copied: there is no need for further drafts of its own.
bool is_copied(const Chain& chain, int64_t b, int64_t draft, float probability) {
    return chain.copied[b] >= 0 && (draft == chain.copied[b] || probability < chain.limits[b]);
}

// A request's draft, as the head's own number of it, and how probable it is.
Guess guess(const Chain& chain, const ChainWork& room, int64_t b, int64_t level) {
    if (!is_number(room.best[b])) return {0, 0.0f};
    int64_t count = chain.to_logits.num_rows, hidden = room.work.hidden;
    Best best = sharpen(room.logits + b * count, count, room.best[b], chain.unrounded,
                        room.normed + b * hidden, hidden);
    if (!is_number(best)) return {0, 0.0f};
    bool takes_best = chain.draws == nullptr || chain.draws[b].temperature <= 0.0 ||
                      chain.draws[b].top_k == 1;
    if (takes_best) return {best.index, 1.0f / best.sum};
    return guess_under_noise(room.logits + b * count, count, best.value, chain.draws[b], level,
                             chain.to_target, chain.rule);
}

// One step of all requests: their newest tokens' outputs, and the best token behind each.
void run_level(Member& me, const Decoder& decoder, const Chain& chain, const Work& work,
               ChainWork& room, int64_t level) {
    const Layer& layer = decoder.layers[0];
    int64_t hidden = decoder.hidden_size, width = layer.heads.num_heads * layer.heads.size;
    int64_t num_requests = chain.rows.num_requests;
    attention(me, layer, work, work.input, 2 * hidden);
    me.work(1, [&](int64_t) { pick_newest(chain, work, room, width, level == 0); });
    project(me, layer, work, work.product, num_requests, [&](Share rows) {
        add_and_norm(work.fresh, {}, room.stream, layer.before_mlp, work.normed, hidden, rows);
    });
    mlp(me, layer, work, num_requests, chain.to_logits, [&](Share rows) {
        add_and_norm(work.fresh, {}, room.stream, decoder.final_norm, room.normed, hidden, rows);
    });
    find_best(me, chain.to_logits, room.normed, hidden, num_requests, Search{true, room.logits},
              room.best, [&](const Best*) {
                  room.goes_on = false;
                  for (int64_t b = 0; b < num_requests; b++) {
                      auto [index, probability] = guess(chain, room, b, level);
                      room.newest[b] = chain.to_target[index];
                      room.path[b] *= probability;
                      if (level == 0 && is_copied(chain, b, room.newest[b], probability))
                          room.path[b] = 0.0f;
                      room.goes_on |= room.path[b] >= chain.least && room.path[b] > 0.0f;
                      chain.drafts[b * chain.depth + level] = room.newest[b];
                      chain.probabilities[b * chain.depth + level] = probability;
                  }
                  *chain.num_levels = level + 1;
              });
}

// The row of a request's newest draft, which stands `ahead` tokens behind its committed ones.
Row draft_row(const Rows& rows, int64_t request, int64_t ahead) {
    Row row = {};
    row.request = request;
    row.number = row.position = rows.context[request] + rows.counts[request] + ahead;
    row.first = rows.first[request];
    row.end = row.number + 1;
    return row;
}

void run_chain(Member& me, const Decoder& decoder, const Chain& chain, ChainWork& room) {
    int64_t count = chain.rows.num_rows, hidden = decoder.hidden_size;
    int64_t num_requests = chain.rows.num_requests;
    fuse_features(me, chain, room, decoder.layers[0].qkv);
    int64_t shares = me.parts_of(count);
    me.work(shares, [&](int64_t i) {
        Share rows = share_of(count, i, shares);
        find_slots_of(room.work, rows);
        for (int64_t t = rows.begin; t < rows.end; t++)
            join_input(chain, room.work, t, chain.tokens[t], feature_before(chain, room.work, t));
    });
    run_level(me, decoder, chain, room.work, room, 0);
    Rows newest = chain.rows;
    newest.num_rows = num_requests;
    Work work = room.work;
    work.rows = &newest;
    for (int64_t level = 1; level < chain.depth && room.goes_on; level++) {
        me.work(1, [&](int64_t) {
            for (int64_t b = 0; b < num_requests; b++) {
                work.row[b] = draft_row(chain.rows, b, level - 1);
                join_input(chain, work, b, room.newest[b],
                           (chain.feeds_normed ? room.normed : room.stream) + b * hidden);
            }
            find_slots_of(work, Share{0, num_requests});
        });
        run_level(me, decoder, chain, work, room, level);
    }
}

}  // namespace
