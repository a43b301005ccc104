// Passes of a decoder over a few rows, from embeddings to logits, in one call.
//
// Threads share every product by its outputs and attention by rows and heads; they meet at a
// barrier wherever one needs what another has made.

#include "layers.h"
#include "packing.h"

#include <atomic>
#include <cstdlib>
#include <new>
#include <vector>

#if defined(_OPENMP)
#include <omp.h>
#define BARRIER _Pragma("omp barrier")
#else
#define BARRIER
#endif

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

void find_all_slots(const Work& work, int thread, int num_threads) {
    int64_t count = work.rows->num_rows;
    Share share = share_of(work.num_views * count, thread, num_threads);
    for (int64_t i = share.begin; i < share.end; i++)
        work.counts[i] = find_slots(*work.rows, work.views[i / count], work.row[i % count],
                                    work.slots + i * work.longest);
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

void attend_rows(const Layer& layer, const Work& work, int thread, int num_threads) {
    const Heads& heads = layer.heads;
    int64_t count = work.rows->num_rows;
    Share share = share_of(count * heads.num_heads, thread, num_threads);
    float* scores = work.scores + thread * work.longest;
    for (int64_t i = share.begin; i < share.end; i++) {
        int64_t t = i / heads.num_heads, h = i % heads.num_heads, place = layer.view * count + t;
        attend(heads, work.product + t * layer.qkv.num_rows + h * heads.size, h, layer.keys,
               layer.values, work.slots + place * work.longest, work.counts[place], scores,
               work.attended + (t * heads.num_heads + h) * heads.size);
    }
}

// Gates and ups, and what comes of them, for the same share of both.
void gates(const Layer& layer, const float* normed, int64_t hidden, int64_t num_rows, float* both,
           int thread, int num_threads, Near& near) {
    const Matrix& matrix = layer.gate_up;
    int64_t width = matrix.num_rows, half = width / 2;
    multiply(matrix, normed, hidden, num_rows, both, width, thread, num_threads, near);
    Share blocks = share_of((half + BLOCK - 1) / BLOCK, thread, num_threads);
    int64_t end = blocks.end * BLOCK < half ? blocks.end * BLOCK : half;
    for (int64_t t = 0; t < num_rows; t++)
        gate_row(both + t * width, both + t * width + half, blocks.begin * BLOCK, end,
                 layer.activation);
}

// From the normed input of attention to what it returns.
void attention(const Layer& layer, const Work& work, const float* input, int64_t input_size,
               int thread, int num_threads, Near& near) {
    int64_t count = work.rows->num_rows;
    multiply(layer.qkv, input, input_size, count, work.product, layer.qkv.num_rows, thread,
             num_threads, near);
    BARRIER
    turn_and_store(layer, work, share_of(count, thread, num_threads));
    BARRIER
    attend_rows(layer, work, thread, num_threads);
    BARRIER
}

void mlp(const Layer& layer, const Work& work, int64_t num_rows, int thread, int num_threads,
         Near& near) {
    gates(layer, work.normed, work.hidden, num_rows, work.hidden_rows, thread, num_threads, near);
    BARRIER
    multiply(layer.down, work.hidden_rows, layer.gate_up.num_rows, num_rows, work.fresh,
             work.hidden, thread, num_threads, near);
    BARRIER
}

void run_layers(const Decoder& decoder, const Pass& pass, const Work& work, int thread,
                int num_threads) {
    Near& near = near_of_thread();
    int64_t count = pass.rows.num_rows, hidden = decoder.hidden_size;
    Share rows = share_of(count, thread, num_threads);
    find_all_slots(work, thread, num_threads);
    add_and_norm(nullptr, {}, pass.stream, decoder.layers[0].before_attention, work.normed, hidden,
                 rows);
    BARRIER
    for (int64_t i = 0; i < decoder.num_layers; i++) {
        const Layer& layer = decoder.layers[i];
        attention(layer, work, work.normed, hidden, thread, num_threads, near);
        multiply(layer.out, work.attended, layer.heads.num_heads * layer.heads.size, count,
                 work.fresh, hidden, thread, num_threads, near);
        BARRIER
        add_and_norm(work.fresh, layer.after_attention, pass.stream, layer.before_mlp, work.normed,
                     hidden, rows);
        BARRIER
        mlp(layer, work, count, thread, num_threads, near);
        bool is_last = i + 1 == decoder.num_layers;
        const Norm& next =
            is_last ? decoder.final_norm : decoder.layers[i + 1].before_attention;
        add_and_norm(work.fresh, layer.after_mlp, pass.stream, next,
                     is_last ? pass.final : work.normed, hidden, rows);
        if (layer.tap >= 0)
            for (int64_t t = rows.begin; t < rows.end; t++)
                memcpy(pass.features + t * pass.features_stride + layer.tap,
                       pass.stream + t * hidden, size_t(hidden) * sizeof(float));
        BARRIER
    }
}

void make_logits(const Decoder& decoder, const float* final, const int64_t* wanted, int64_t count,
                 float* logits, const Work& work, int thread, int num_threads) {
    int64_t hidden = decoder.hidden_size;
    const float* from = final;
    if (wanted != nullptr) {
        Share rows = share_of(count, thread, num_threads);
        for (int64_t r = rows.begin; r < rows.end; r++)
            memcpy(work.normed + r * hidden, final + wanted[r] * hidden,
                   size_t(hidden) * sizeof(float));
        from = work.normed;
        BARRIER
    }
    multiply(decoder.to_logits, from, hidden, count, logits, decoder.to_logits.num_rows, thread,
             num_threads, near_of_thread());
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

void run_step(const Decoder& decoder, const Step& step, const Work& work, int thread,
              int num_threads) {
    Near& near = near_of_thread();
    const Layer& layer = decoder.layers[0];
    int64_t hidden = decoder.hidden_size, width = layer.heads.num_heads * layer.heads.size;
    find_all_slots(work, thread, num_threads);
    join_inputs(step, work, share_of(work.rows->num_rows, thread, num_threads));
    BARRIER
    attention(layer, work, work.input, 2 * hidden, thread, num_threads, near);
    int64_t count = step.num_outputs;
    Share rows = share_of(count, thread, num_threads);
    for (int64_t r = rows.begin; r < rows.end; r++) {
        int64_t t = step.output_rows == nullptr ? r : step.output_rows[r];
        const float* residual = step.keeps_normed ? work.input + (2 * t + 1) * hidden
                                                  : step.hidden + step.hidden_rows[t] * hidden;
        memcpy(step.stream + r * hidden, residual, size_t(hidden) * sizeof(float));
        // The product is not needed any more, and queries are a part of it.
        memcpy(work.product + r * width, work.attended + t * width, size_t(width) * sizeof(float));
    }
    BARRIER
    multiply(layer.out, work.product, width, count, work.fresh, hidden, thread, num_threads, near);
    BARRIER
    add_and_norm(work.fresh, {}, step.stream, layer.before_mlp, work.normed, hidden, rows);
    BARRIER
    mlp(layer, work, count, thread, num_threads, near);
    add_and_norm(work.fresh, {}, step.stream, decoder.final_norm, step.normed, hidden, rows);
}

// Runs what every thread does, on as many threads as there really are.
template <typename Body> void on_threads(int64_t wanted, Body body) {
#if defined(_OPENMP)
#pragma omp parallel num_threads(int(wanted))
    body(omp_get_thread_num(), omp_get_num_threads());
#else
    (void)wanted;
    body(0, 1);
#endif
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
    on_threads(num_threads, [&](int thread, int count) {
        Share blocks = share_of((num_rows + BLOCK - 1) / BLOCK, thread, count);
        for (int64_t block = blocks.begin; block < blocks.end && is_packed; block++)
            if (!pack_block(rows, num_rows, num_columns, int(format), may_round != 0, block, codes,
                            steps))
                is_packed = 0;
    });
    return is_packed;
}

int64_t fledge_multiply(const Matrix* matrix, const float* x, int64_t x_stride, int64_t num_rows,
                        float* y, int64_t y_stride, int64_t num_threads) {
    on_threads(num_threads, [&](int thread, int count) {
        multiply(*matrix, x, x_stride, num_rows, y, y_stride, thread, count, near_of_thread());
    });
    return 0;
}

int64_t fledge_pass(const Decoder* decoder, const Pass* pass, int64_t num_threads) {
    return guarded([&] {
        Work work = begin_work(*decoder, pass->rows, pass->views, pass->num_views,
                               int(num_threads));
        on_threads(num_threads, [&](int thread, int count) {
            run_layers(*decoder, *pass, work, thread, count);
            if (pass->logits != nullptr)
                make_logits(*decoder, pass->final, pass->logit_rows, pass->num_logit_rows,
                            pass->logits, work, thread, count);
        });
    });
}

int64_t fledge_step(const Decoder* decoder, const Step* step, int64_t num_threads) {
    return guarded([&] {
        Work work = begin_work(*decoder, step->rows, &step->view, 1, int(num_threads));
        on_threads(num_threads, [&](int thread, int count) {
            run_step(*decoder, *step, work, thread, count);
        });
    });
}
