// Passes of a decoder over a few rows, from embeddings to logits, in one call.

#include "best.h"
#include "blocks.h"
#include "chain.h"
#include "packing.h"
#include "screen.h"
#include "walk.h"

extern "C" {

struct Pass {
    Rows rows;
    const View* views;
    int64_t num_views;
    const int64_t* tokens;   // with their embeddings, or where they are missing:
    const float* embedding;  // [vocabulary, hidden]
    float* stream;  // [rows, hidden]: embeddings; what the layers leave
    float* features;  // [rows, features_stride]
    int64_t features_stride;
    float* final;  // [rows, hidden]: behind the last norm
    const int64_t* logit_rows;  // all where it is missing
    int64_t num_logit_rows;
    float* logits;  // or, where they are missing:
    int64_t* best_tokens;  // the token with the largest logit of each row; -1 if it is no number
};

// A pass of a draft head: one layer over embeddings and hidden states side by side.
struct Step {
    Rows rows;
    View view;
    const int64_t* tokens;
    const float* embedding;     // [vocabulary, hidden]
    const float* hidden;        // [any, hidden]
    const int64_t* hidden_rows;  // the hidden state before each token
    Norm embedding_norm, hidden_norm;
    int64_t keeps_normed;  // whether the normed hidden state is what attention is added to
    const int64_t* output_rows;  // all where it is missing: the others only leave keys and values
    int64_t num_outputs;
    float* stream;  // [outputs, hidden]
    float* normed;  // [outputs, hidden]: behind the final norm
};

// Whether the rows could be packed as they are asked to be.
int64_t fledge_pack(const float* rows, int64_t num_rows, int64_t num_columns, int64_t format,
                    int64_t may_round, uint8_t* codes, uint8_t* steps, int64_t num_threads);
int64_t fledge_multiply(const Matrix* matrix, const float* x, int64_t x_stride, int64_t num_rows,
                        float* y, int64_t y_stride, int64_t num_threads);
int64_t fledge_best(const Matrix* matrix, const float* x, int64_t x_stride, int64_t num_rows,
                    int64_t* tokens, int64_t num_threads);
int64_t fledge_pass(const Decoder* decoder, const Pass* pass, int64_t num_threads);
int64_t fledge_step(const Decoder* decoder, const Step* step, int64_t num_threads);
int64_t fledge_chain(const Decoder* decoder, const Chain* chain, int64_t num_threads);
int64_t fledge_walk(const Walk* walk, int64_t num_threads);
}

namespace {

void run_layers(Member& me, const Decoder& decoder, const Pass& pass, const Work& work) {
    int64_t count = pass.rows.num_rows, hidden = decoder.hidden_size;
    int64_t shares = me.parts_of(count);
    me.work(shares, [&](int64_t i) {
        Share rows = share_of(count, i, shares);
        find_slots_of(work, rows);
        for (int64_t t = rows.begin; t < rows.end && pass.tokens != nullptr; t++)
            memcpy(pass.stream + t * hidden, pass.embedding + pass.tokens[t] * hidden,
                   size_t(hidden) * sizeof(float));
        add_and_norm(nullptr, {}, pass.stream, decoder.layers[0].before_attention, work.normed,
                     hidden, rows);
    });
    for (int64_t i = 0; i < decoder.num_layers; i++) {
        const Layer& layer = decoder.layers[i];
        attention(me, layer, work, work.normed, hidden);
        project(me, layer, work, work.attended, count, [&](Share rows) {
            add_and_norm(work.fresh, layer.after_attention, pass.stream, layer.before_mlp,
                         work.normed, hidden, rows);
        });
        bool is_last = i + 1 == decoder.num_layers;
        const Norm& next = is_last ? decoder.final_norm : decoder.layers[i + 1].before_attention;
        const Matrix& behind = is_last ? decoder.to_logits : decoder.layers[i + 1].qkv;
        mlp(me, layer, work, count, behind, [&](Share rows) {
            add_and_norm(work.fresh, layer.after_mlp, pass.stream, next,
                         is_last ? pass.final : work.normed, hidden, rows);
            if (layer.tap < 0) return;
            for (int64_t t = rows.begin; t < rows.end; t++)
                memcpy(pass.features + t * pass.features_stride + layer.tap,
                       pass.stream + t * hidden, size_t(hidden) * sizeof(float));
        });
    }
}

// Room for what parts of a search find.
struct SearchRoom {
    Best* best;
    Screened& screened;
    bool is_screened;
};

// The token with the largest of many products of each row; -1 if that is no number.
void find_best_tokens(Member& me, const Matrix& matrix, const float* x, int64_t x_stride, int64_t num_rows,
                      const SearchRoom& room, int64_t* tokens) {
    auto note = [&](const Best* best) {
        for (int64_t r = 0; r < num_rows; r++) tokens[r] = is_number(best[r]) ? best[r].index : -1;
    };
    if (room.is_screened)
        find_best_screened(me, matrix, x, x_stride, num_rows, room.screened, room.best, note);
    else
        find_best(me, matrix, x, x_stride, num_rows, Search{}, room.best, note);
}

void make_logits(Member& me, const Decoder& decoder, const Pass& pass, const Work& work,
                 const SearchRoom& room) {
    int64_t hidden = decoder.hidden_size, count = pass.num_logit_rows;
    const float* from = pass.final;
    if (pass.logit_rows != nullptr) {
        me.work(1, [&](int64_t) {
            for (int64_t r = 0; r < count; r++)
                memcpy(work.normed + r * hidden, pass.final + pass.logit_rows[r] * hidden,
                       size_t(hidden) * sizeof(float));
        });
        from = work.normed;
    }
    const Matrix& matrix = decoder.to_logits;
    if (pass.logits == nullptr) {
        find_best_tokens(me, matrix, from, hidden, count, room, pass.best_tokens);
        return;
    }
    OwnFactors factors(matrix, from, hidden, count, near_of_thread());
    Coming coming = begin_of(me, decoder.layers[0].qkv);
    me.work(parts_of(me, matrix), [&](int64_t part) {
        multiply_part(me, matrix, factors.get(), pass.logits, part, coming);
    });
}

// Embedding and hidden state of some rows, each normed, side by side.
void join_inputs(const Step& step, const Work& work, Share rows) {
    int64_t hidden = work.hidden;
    for (int64_t t = rows.begin; t < rows.end; t++) {
        float* to = work.input + t * 2 * hidden;
        norm_row(step.embedding + step.tokens[t] * hidden, step.embedding_norm,
                 step.embedding_norm.weight, hidden, to);
        norm_row(step.hidden + step.hidden_rows[t] * hidden, step.hidden_norm,
                 step.hidden_norm.weight, hidden, to + hidden);
    }
}

// What the rows asked for go on with: what they are added to, and what attention gave them.
void pick_outputs(const Step& step, const Work& work, int64_t width) {
    int64_t hidden = work.hidden;
    for (int64_t r = 0; r < step.num_outputs; r++) {
        int64_t t = step.output_rows == nullptr ? r : step.output_rows[r];
        const float* residual = step.keeps_normed ? work.input + (2 * t + 1) * hidden
                                                  : step.hidden + step.hidden_rows[t] * hidden;
        memcpy(step.stream + r * hidden, residual, size_t(hidden) * sizeof(float));
        // The product is not needed any more, and queries are a part of it.
        memcpy(work.product + r * width, work.attended + t * width, size_t(width) * sizeof(float));
    }
}

void run_step(Member& me, const Decoder& decoder, const Step& step, const Work& work) {
    const Layer& layer = decoder.layers[0];
    int64_t hidden = decoder.hidden_size, width = layer.heads.num_heads * layer.heads.size;
    int64_t count = work.rows->num_rows, shares = me.parts_of(count);
    me.work(shares, [&](int64_t i) {
        Share rows = share_of(count, i, shares);
        find_slots_of(work, rows);
        join_inputs(step, work, rows);
    });
    attention(me, layer, work, work.input, 2 * hidden);
    me.work(1, [&](int64_t) { pick_outputs(step, work, width); });
    project(me, layer, work, work.product, step.num_outputs, [&](Share rows) {
        add_and_norm(work.fresh, {}, step.stream, layer.before_mlp, work.normed, hidden, rows);
    });
    mlp(me, layer, work, step.num_outputs, layer.qkv, [&](Share rows) {
        add_and_norm(work.fresh, {}, step.stream, decoder.final_norm, step.normed, hidden, rows);
    });
}

constexpr int64_t PHASES_OF_LAYER = 12;
constexpr int64_t OTHER_PHASES = 8;

// Room for what each part of a search finds for each row.
Best* room_for_best(int64_t num_rows, int64_t num_threads) {
    static thread_local std::vector<Best> room;
    size_t needed = size_t(num_rows * num_threads * PARTS_PER_THREAD);
    if (room.size() < needed) room.resize(needed);
    return room.data();
}

SearchRoom room_for_search(const Matrix& matrix, int64_t num_rows, int64_t num_threads) {
    Screened& screened = room_for_screened(num_rows, num_threads);
    return {room_for_best(num_rows, num_threads), screened, begin_screened(matrix, num_rows, screened)};
}

template <typename Body> int64_t guarded(Body body) {
    try {
        body();
    } catch (const std::bad_alloc&) {
        return 1;
    }
    return 0;
}

}  // namespace

int64_t fledge_pack(const float* rows, int64_t num_rows, int64_t num_columns, int64_t format,
                    int64_t may_round, uint8_t* codes, uint8_t* steps, int64_t num_threads) {
    std::atomic<int64_t> is_packed(1);
    int64_t num_blocks = (num_rows + BLOCK - 1) / BLOCK;
    on_threads(num_threads, 1, [&](Member& me) {
        me.work(num_blocks, [&](int64_t block) {
            if (is_packed && !pack_block(rows, num_rows, num_columns, int(format), may_round != 0,
                                         block, codes, steps))
                is_packed = 0;
        });
    });
    return is_packed;
}

int64_t fledge_multiply(const Matrix* matrix, const float* x, int64_t x_stride, int64_t num_rows,
                        float* y, int64_t y_stride, int64_t num_threads) {
    on_threads(num_threads, 1, [&](Member& me) {
        int64_t parts = me.parts_of(matrix->num_rows / UNIT);
        Near& near = near_of_thread();
        OwnFactors factors(*matrix, x, x_stride, num_rows, near);
        me.work(parts, [&](int64_t part) {
            Coming next = units_of_part(*matrix, part + 1, parts);
            multiply(*matrix, factors.get(), y, y_stride, part, parts, next, near);
        });
    });
    return 0;
}

int64_t fledge_best(const Matrix* matrix, const float* x, int64_t x_stride, int64_t num_rows,
                    int64_t* tokens, int64_t num_threads) {
    return guarded([&] {
        SearchRoom room = room_for_search(*matrix, num_rows, num_threads);
        on_threads(num_threads, OTHER_PHASES, [&](Member& me) {
            find_best_tokens(me, *matrix, x, x_stride, num_rows, room, tokens);
        });
    });
}

int64_t fledge_pass(const Decoder* decoder, const Pass* pass, int64_t num_threads) {
    return guarded([&] {
        Work work = begin_work(*decoder, pass->rows, pass->views, pass->num_views,
                               int(num_threads));
        SearchRoom room = room_for_search(decoder->to_logits, pass->num_logit_rows, num_threads);
        on_threads(num_threads, decoder->num_layers * PHASES_OF_LAYER + OTHER_PHASES,
                   [&](Member& me) {
                       run_layers(me, *decoder, *pass, work);
                       make_logits(me, *decoder, *pass, work, room);
                   });
    });
}

int64_t fledge_step(const Decoder* decoder, const Step* step, int64_t num_threads) {
    return guarded([&] {
        Work work = begin_work(*decoder, step->rows, &step->view, 1, int(num_threads));
        on_threads(num_threads, PHASES_OF_LAYER + OTHER_PHASES,
                   [&](Member& me) { run_step(me, *decoder, *step, work); });
    });
}

int64_t fledge_chain(const Decoder* decoder, const Chain* chain, int64_t num_threads) {
    return guarded([&] {
        ChainWork room = {};
        room.work = begin_work(*decoder, chain->rows, &chain->view, 1, int(num_threads),
                               chain->depth);
        int64_t size = decoder->hidden_size, count = chain->rows.num_requests;
        static thread_local std::vector<float> floats;
        static thread_local std::vector<int64_t> tokens;
        int64_t num_logits = count * chain->to_logits.num_rows;
        floats.resize(size_t((chain->num_features + 2 * count) * size + count + num_logits));
        tokens.resize(size_t(count));
        room.best = room_for_best(count, num_threads);
        room.fused = floats.data();
        room.stream = room.fused + chain->num_features * size;
        room.normed = room.stream + count * size;
        room.path = room.normed + count * size;
        room.logits = room.path + count;
        room.newest = tokens.data();
        for (int64_t b = 0; b < count; b++) room.path[b] = 1.0f;
        on_threads(num_threads, chain->depth * (PHASES_OF_LAYER + OTHER_PHASES) + OTHER_PHASES,
                   [&](Member& me) { run_chain(me, *decoder, *chain, room); });
    });
}

int64_t fledge_walk(const Walk* walk, int64_t num_threads) {
    return guarded([&] {
        static thread_local std::vector<Glance> glances;
        static thread_local std::vector<int64_t> walking;
        int64_t count = walk->num_requests, num_levels = 0;
        for (int64_t b = 0; b < count; b++)
            num_levels = walk->counts[b] > num_levels ? walk->counts[b] : num_levels;
        glances.resize(size_t(count * num_threads * PARTS_PER_THREAD));
        walking.resize(size_t((num_levels + 1) * (count + 1)));
        WalkRoom room = {glances.data(), walking.data() + num_levels + 1, walking.data(), count};
        room.num_walking[0] = count;
        for (int64_t b = 0; b < count; b++) room.walking[b] = b;
        on_threads(num_threads, num_levels * PHASES_OF_WALK_LEVEL,
                   [&](Member& me) { run_walk(me, *walk, room); });
    });
}
