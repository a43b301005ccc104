// Passes of a decoder over a few rows, from embeddings to logits, in one call.
//
// Threads share every product by its outputs and attention by rows and heads.

#include "layers.h"
#include "packing.h"
#include "team.h"

#include <new>
#include <vector>

extern "C" {

struct Layer {
    Matrix qkv, out, gate_up, down;
    Norm before_attention, after_attention, before_mlp, after_mlp;
    Norm head_norm;  // weights [heads + key heads, size]
    Norm query_width, key_width;
    Heads heads;
    const float* rotation;  // [positions, size]: cosines, then sines
    float* keys;
    float* values;
    int32_t view;
    int32_t activation;
    int64_t tap;  // column of the features that get the stream behind this layer, or -1
};

struct Decoder {
    const Layer* layers;
    int64_t num_layers;
    int64_t hidden_size;
    Norm final_norm;
    Matrix to_logits;
};

struct Pass {
    Rows rows;
    const View* views;
    int64_t num_views;
    float* stream;    // [rows, hidden]: embeddings; what the layers leave
    float* features;  // [rows, features_stride]
    int64_t features_stride;
    float* final;  // [rows, hidden]: behind the last norm
    const int64_t* logit_rows;  // all where it is missing
    int64_t num_logit_rows;
    float* logits;
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
int64_t fledge_pass(const Decoder* decoder, const Pass* pass, int64_t num_threads);
int64_t fledge_step(const Decoder* decoder, const Step* step, int64_t num_threads);
}

namespace {

// Memory that grows to what the largest pass of this thread needed.
struct Room {
    std::vector<char> bytes;
    size_t used = 0;

    void clear() { used = 0; }
    template <typename T> size_t keep(int64_t count) {
        size_t at = used;
        used += (size_t(count) * sizeof(T) + 127) / 64 * 64;
        return at;
    }
    void make() {
        if (bytes.size() < used + 64) bytes.resize(used + 64);
    }
    template <typename T> T* at(size_t place) {
        uintptr_t start = (uintptr_t(bytes.data()) + 63) / 64 * 64;
        return (T*)(start + place);
    }
};

thread_local Room own_room;
thread_local Near* own_near = nullptr;

Near& near_of_thread() {
    if (own_near == nullptr) own_near = new (std::align_val_t(64)) Near;
    return *own_near;
}

struct Work {
    const Rows* rows;
    const View* views;
    int64_t num_views, hidden;
    Row* row;
    int32_t* slots;  // [views, rows, longest]
    int64_t* counts;
    int64_t longest;
    float *normed, *product, *attended, *fresh, *hidden_rows, *scores, *input;
};

int64_t requests_of_rows(const Rows& rows, Row* found) {
    int64_t longest = 1, request = 0;
    for (int64_t t = 0; t < rows.num_rows; t++) {
        if (rows.width > 0) request = t / rows.width;
        else
            while (request + 1 < rows.num_requests && rows.starts[request + 1] <= t) request++;
        found[t] = find_row(rows, t, request);
        int64_t most = found[t].end - found[t].first + found[t].num_marked;
        longest = most > longest ? most : longest;
    }
    return longest;
}

int64_t widest(const Decoder& decoder, int64_t (*width)(const Layer&)) {
    int64_t most = 0;
    for (int64_t i = 0; i < decoder.num_layers; i++) {
        int64_t one = width(decoder.layers[i]);
        most = one > most ? one : most;
    }
    return most;
}

Work begin_work(const Decoder& decoder, const Rows& rows, const View* views, int64_t num_views,
                int num_threads) {
    static thread_local std::vector<Row> found;
    found.resize(size_t(rows.num_rows));
    Work work = {};
    work.rows = &rows;
    work.views = views;
    work.num_views = num_views;
    work.hidden = decoder.hidden_size;
    work.row = found.data();
    work.longest = (requests_of_rows(rows, work.row) + 15) / 16 * 16;
    int64_t count = rows.num_rows;
    Room& room = own_room;
    room.clear();
    size_t slots = room.keep<int32_t>(num_views * count * work.longest);
    size_t counts = room.keep<int64_t>(num_views * count);
    size_t normed = room.keep<float>(count * decoder.hidden_size);
    size_t product = room.keep<float>(
        count * widest(decoder, [](const Layer& l) { return int64_t(l.qkv.num_rows); }));
    size_t attended = room.keep<float>(
        count * widest(decoder, [](const Layer& l) { return l.heads.num_heads * l.heads.size; }));
    size_t fresh = room.keep<float>(count * decoder.hidden_size);
    size_t hidden_rows = room.keep<float>(
        count * widest(decoder, [](const Layer& l) { return int64_t(l.gate_up.num_rows); }));
    size_t scores = room.keep<float>(work.longest * num_threads);
    size_t input = room.keep<float>(count * 2 * decoder.hidden_size);
    room.make();
    work.slots = room.at<int32_t>(slots);
    work.counts = room.at<int64_t>(counts);
    work.normed = room.at<float>(normed);
    work.product = room.at<float>(product);
    work.attended = room.at<float>(attended);
    work.fresh = room.at<float>(fresh);
    work.hidden_rows = room.at<float>(hidden_rows);
    work.scores = room.at<float>(scores);
    work.input = room.at<float>(input);
    return work;
}

// Rows from which on what lies between two products is shared out too.
constexpr int64_t MANY_ROWS = 16;

// What follows a product row by row: by whoever ends it where rows are few, else by all.
template <typename Part, typename Each>
void work_then_rows(Member& me, int64_t num_parts, Part part, int64_t num_rows, Each each) {
    if (num_rows <= MANY_ROWS) return me.work(num_parts, part, [&] { each(Share{0, num_rows}); });
    me.work(num_parts, part);
    int64_t shares = me.parts_of(num_rows);
    me.work(shares, [&](int64_t i) { each(share_of(num_rows, i, shares)); });
}

// The stream with `fresh` added to it, and that normed; either may be missing.
void add_and_norm(const float* fresh, const Norm& after, float* stream, const Norm& before,
                  float* normed, int64_t size, Share rows) {
    for (int64_t t = rows.begin; t < rows.end; t++) {
        float* to = stream + t * size;
        if (fresh != nullptr) {
            const float* from = fresh + t * size;
            if (after.weight != nullptr) {
                norm_row(from, after, after.weight, size, normed + t * size);
                from = normed + t * size;
            }
            for (int64_t i = 0; i < size; i++) to[i] += from[i];
        }
        if (before.weight != nullptr) norm_row(to, before, before.weight, size, normed + t * size);
        else memcpy(normed + t * size, to, size_t(size) * sizeof(float));
    }
}

void find_slots_of(const Work& work, Share rows) {
    int64_t count = work.rows->num_rows;
    for (int64_t view = 0; view < work.num_views; view++)
        for (int64_t t = rows.begin; t < rows.end; t++) {
            int64_t i = view * count + t;
            work.counts[i] = find_slots(*work.rows, work.views[view], work.row[t],
                                        work.slots + i * work.longest);
        }
}

// Norms and turns queries and keys of some rows, and stores keys and values.
void turn_and_store(const Layer& layer, const Work& work, Share rows) {
    const Heads& heads = layer.heads;
    const View& view = work.views[layer.view];
    int64_t size = heads.size, half = size / 2, width = layer.qkv.num_rows;
    int64_t query_width = heads.num_heads * size, key_width = heads.num_kv_heads * size;
    for (int64_t t = rows.begin; t < rows.end; t++) {
        float* product = work.product + t * width;
        if (layer.query_width.weight != nullptr) {
            norm_row(product, layer.query_width, layer.query_width.weight, query_width, product);
            norm_row(product + query_width, layer.key_width, layer.key_width.weight, key_width,
                     product + query_width);
        }
        const Row& row = work.row[t];
        const float* cos = layer.rotation + row.position * size;
        for (int64_t h = 0; h < heads.num_heads + heads.num_kv_heads; h++) {
            float* head = product + h * size;
            if (layer.head_norm.weight != nullptr)
                norm_row(head, layer.head_norm, layer.head_norm.weight + h * size, size, head);
            rotate(head, cos, cos + half, size);
        }
        int64_t slot = slot_of(view, row.request, row.number);
        if (slot < 0) continue;
        memcpy(layer.keys + slot * key_width, product + query_width,
               size_t(key_width) * sizeof(float));
        memcpy(layer.values + slot * key_width, product + query_width + key_width,
               size_t(key_width) * sizeof(float));
    }
}

void attend_items(const Layer& layer, const Work& work, Share items, int thread) {
    const Heads& heads = layer.heads;
    int64_t count = work.rows->num_rows;
    float* scores = work.scores + thread * work.longest;
    for (int64_t i = items.begin; i < items.end; i++) {
        int64_t t = i / heads.num_heads, h = i % heads.num_heads, place = layer.view * count + t;
        attend(heads, work.product + t * layer.qkv.num_rows + h * heads.size, h, layer.keys,
               layer.values, work.slots + place * work.longest, work.counts[place], scores,
               work.attended + (t * heads.num_heads + h) * heads.size);
    }
}

// From the normed input of attention to what its heads return.
void attention(Member& me, const Layer& layer, const Work& work, const float* input,
               int64_t input_size) {
    Near& near = near_of_thread();
    int64_t count = work.rows->num_rows, parts = me.parts_of(layer.qkv.num_rows / UNIT);
    work_then_rows(
        me, parts,
        [&](int64_t part) {
            multiply(layer.qkv, input, input_size, count, work.product, layer.qkv.num_rows, part,
                     parts, near);
        },
        count, [&](Share rows) { turn_and_store(layer, work, rows); });
    int64_t items = count * layer.heads.num_heads, shares = me.parts_of(items);
    me.work(shares, [&](int64_t i) {
        attend_items(layer, work, share_of(items, i, shares), me.thread);
    });
}

// What attention returned, times its matrix; then `each` row goes on.
template <typename Each>
void project(Member& me, const Layer& layer, const Work& work, const float* attended,
             int64_t num_rows, Each each) {
    Near& near = near_of_thread();
    int64_t parts = me.parts_of(work.hidden / UNIT), width = layer.heads.num_heads * layer.heads.size;
    work_then_rows(
        me, parts,
        [&](int64_t part) {
            multiply(layer.out, attended, width, num_rows, work.fresh, work.hidden, part, parts,
                     near);
        },
        num_rows, each);
}

// Gates and ups, and what comes of them, for the same share of both; then `each` row goes on.
template <typename Each>
void mlp(Member& me, const Layer& layer, const Work& work, int64_t num_rows, Each each) {
    Near& near = near_of_thread();
    const Matrix& both = layer.gate_up;
    int64_t width = both.num_rows, half = width / 2, blocks = blocks_of(both.pieces[0]);
    int64_t parts = me.parts_of(blocks);
    me.work(parts, [&](int64_t part) {
        Share share = share_of(blocks, part, parts);
        for (int p = 0; p < 2; p++)
            multiply_piece(both, both.pieces[p], p * half, work.normed, work.hidden, num_rows,
                           work.hidden_rows, width, share, near);
        int64_t end = share.end * BLOCK < half ? share.end * BLOCK : half;
        for (int64_t t = 0; t < num_rows; t++) {
            float* row = work.hidden_rows + t * width;
            gate_row(row, row + half, share.begin * BLOCK, end, layer.activation);
        }
    });
    int64_t shares = me.parts_of(work.hidden / UNIT);
    work_then_rows(
        me, shares,
        [&](int64_t part) {
            multiply(layer.down, work.hidden_rows, width, num_rows, work.fresh, work.hidden, part,
                     shares, near);
        },
        num_rows, each);
}

void run_layers(Member& me, const Decoder& decoder, const Pass& pass, const Work& work) {
    int64_t count = pass.rows.num_rows, hidden = decoder.hidden_size;
    int64_t shares = me.parts_of(count);
    me.work(shares, [&](int64_t i) {
        Share rows = share_of(count, i, shares);
        find_slots_of(work, rows);
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
        mlp(me, layer, work, count, [&](Share rows) {
            add_and_norm(work.fresh, layer.after_mlp, pass.stream, next,
                         is_last ? pass.final : work.normed, hidden, rows);
            if (layer.tap < 0) return;
            for (int64_t t = rows.begin; t < rows.end; t++)
                memcpy(pass.features + t * pass.features_stride + layer.tap,
                       pass.stream + t * hidden, size_t(hidden) * sizeof(float));
        });
    }
}

void make_logits(Member& me, const Decoder& decoder, const Pass& pass, const Work& work) {
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
    int64_t parts = me.parts_of(matrix.num_rows / UNIT);
    me.work(parts, [&](int64_t part) {
        multiply(matrix, from, hidden, count, pass.logits, matrix.num_rows, part, parts,
                 near_of_thread());
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
    mlp(me, layer, work, step.num_outputs, [&](Share rows) {
        add_and_norm(work.fresh, {}, step.stream, decoder.final_norm, step.normed, hidden, rows);
    });
}

constexpr int64_t PHASES_OF_LAYER = 8;
constexpr int64_t OTHER_PHASES = 8;

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
        me.work(parts, [&](int64_t part) {
            multiply(*matrix, x, x_stride, num_rows, y, y_stride, part, parts, near_of_thread());
        });
    });
    return 0;
}

int64_t fledge_pass(const Decoder* decoder, const Pass* pass, int64_t num_threads) {
    return guarded([&] {
        Work work = begin_work(*decoder, pass->rows, pass->views, pass->num_views,
                               int(num_threads));
        on_threads(num_threads, decoder->num_layers * PHASES_OF_LAYER + OTHER_PHASES,
                   [&](Member& me) {
                       run_layers(me, *decoder, *pass, work);
                       make_logits(me, *decoder, *pass, work);
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
