// The layers of a decoder over a few rows: what passes of a target and steps of a head share.
//
// Threads share every product by its outputs and attention by rows and heads.
#pragma once

#include "team.h"
#include "work.h"

namespace {

// What follows a product row by row: by whoever ends it where rows are few, else by all.
template <typename Part, typename Each>
void work_then_rows(Member& me, int64_t num_parts, Part part, int64_t num_rows, Each each) {
    if (num_rows <= MANY_ROWS) return me.work(num_parts, part, [&] { each(Share{0, num_rows}); });
    me.work(num_parts, part);
    int64_t shares = me.parts_of(num_rows);
    me.work(shares, [&](int64_t i) { each(share_of(num_rows, i, shares)); });
}

// The factors of a product: of many rows made by all threads together, each row once.
OwnFactors factors_of(Member& me, const Work& work, const Matrix& matrix, const float* x, int64_t stride,
                      int64_t num_rows) {
    Near& near = near_of_thread();
    if (num_rows <= MANY_ROWS) return OwnFactors(matrix, x, stride, num_rows, near);
    Factors factors = {x, stride, num_rows, work.units, matrix.num_columns / UNIT};
    Asked asked = asked_by(matrix);
    if (asked.is_any) {
        int64_t shares = me.parts_of(num_rows);
        me.work(shares, [&](int64_t i) {
            Share rows = share_of(num_rows, i, shares);
            prepare_rows(factors, asked, rows.begin, rows.end, work.units);
        });
    }
    return OwnFactors(matrix, factors, near);
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

// Items are rows and heads, in an order in which keys stay near: heads that see the same keys, one row after the
// other.
void attend_items(const Layer& layer, const Work& work, Share items, int thread) {
    const Heads& heads = layer.heads;
    int64_t num_rows = work.rows->num_rows, group = heads.num_heads / heads.num_kv_heads;
    int64_t stride = heads.num_kv_heads * heads.size;
    for (int64_t i = items.begin; i < items.end;) {
        int64_t t = i / group % num_rows, kv_head = i / group / num_rows, head = kv_head * group + i % group;
        int64_t left = group - i % group, place = layer.view * num_rows + t;
        if (items.end - i < left) left = items.end - i;
        Sight sight = {layer.keys + kv_head * heads.size,   layer.values + kv_head * heads.size, stride,
                       work.slots + place * work.longest,   work.counts[place],
                       work.scores + thread * MOST_HEADS * work.longest, work.longest};
        i += attend(heads, work.product + t * layer.qkv.num_rows + head * heads.size, left, sight,
                    work.attended + (t * heads.num_heads + head) * heads.size);
    }
}

int64_t parts_of(const Member& me, const Matrix& matrix) { return me.parts_of(matrix.num_rows / UNIT); }

// What a thread reads when it begins with its parts of a matrix.
Coming begin_of(const Member& me, const Matrix& matrix) {
    int64_t parts = parts_of(me, matrix);
    return units_of_part(matrix, me.first_part(parts), parts);
}

// One part of a product whose parts are shared out; behind the thread's own last one it reads what comes.
void multiply_part(const Member& me, const Matrix& matrix, const Factors& factors, float* y, int64_t part,
                   const Coming& coming) {
    int64_t parts = parts_of(me, matrix);
    Coming next = me.is_own_last(part, parts) ? coming : units_of_part(matrix, part + 1, parts);
    multiply(matrix, factors, y, matrix.num_rows, part, parts, next, near_of_thread());
}

// From the normed input of attention to what its heads return.
void attention(Member& me, const Layer& layer, const Work& work, const float* input,
               int64_t input_size) {
    int64_t count = work.rows->num_rows;
    OwnFactors factors = factors_of(me, work, layer.qkv, input, input_size, count);
    Coming coming = begin_of(me, layer.out);
    work_then_rows(
        me, parts_of(me, layer.qkv),
        [&](int64_t part) { multiply_part(me, layer.qkv, factors.get(), work.product, part, coming); },
        count, [&](Share rows) { turn_and_store(layer, work, rows); });
    // Heads that see the same keys stay together where all threads get as many of them.
    int64_t items = count * layer.heads.num_heads, groups = count * layer.heads.num_kv_heads;
    int64_t each = layer.heads.num_heads / layer.heads.num_kv_heads;
    int64_t together = groups % me.num_threads == 0 ? each : 1;
    int64_t shares = me.parts_of(items / together);
    me.work(shares, [&](int64_t i) {
        Share share = share_of(items / together, i, shares);
        attend_items(layer, work, Share{share.begin * together, share.end * together}, me.thread);
    });
}

// The same of gates and ups, whose parts have some of both.
Coming begin_of_gates(const Member& me, const Layer& layer) {
    int64_t blocks = blocks_of(layer.gate_up.pieces[0]), parts = me.parts_of(blocks);
    Share share = share_of_blocks(blocks, me.first_part(parts), parts);
    return units_of_block(layer.gate_up.pieces[0], share.begin, layer.gate_up.num_columns);
}

// What attention returned, times its matrix; then `each` row goes on.
template <typename Each>
void project(Member& me, const Layer& layer, const Work& work, const float* attended,
             int64_t num_rows, Each each) {
    int64_t width = layer.heads.num_heads * layer.heads.size;
    OwnFactors factors = factors_of(me, work, layer.out, attended, width, num_rows);
    Coming coming = begin_of_gates(me, layer);
    work_then_rows(
        me, parts_of(me, layer.out),
        [&](int64_t part) { multiply_part(me, layer.out, factors.get(), work.fresh, part, coming); },
        num_rows, each);
}

// Gates and ups, and what comes of them, for the same share of both; then `each` row goes on, and `behind` is read.
template <typename Each>
void mlp(Member& me, const Layer& layer, const Work& work, int64_t num_rows, const Matrix& behind, Each each) {
    Near& near = near_of_thread();
    const Matrix& both = layer.gate_up;
    int64_t width = both.num_rows, half = width / 2, blocks = blocks_of(both.pieces[0]);
    int64_t parts = me.parts_of(blocks);
    OwnFactors normed = factors_of(me, work, both, work.normed, work.hidden, num_rows);
    Coming coming = begin_of(me, layer.down);
    me.work(parts, [&](int64_t part) {
        Share share = share_of_blocks(blocks, part, parts);
        Coming ups = units_of_block(both.pieces[1], share.begin, both.num_columns);
        Coming gates = units_of_block(both.pieces[0], share.end, both.num_columns);
        Coming next = me.is_own_last(part, parts) ? coming : gates;
        for (int p = 0; p < 2; p++)
            multiply_piece(both, both.pieces[p], p * half, normed.get(), num_rows,
                           work.hidden_rows, width, share, p == 0 ? ups : next, near);
        int64_t end = share.end * BLOCK < half ? share.end * BLOCK : half;
        for (int64_t t = 0; t < num_rows; t++) {
            float* row = work.hidden_rows + t * width;
            gate_row(row, row + half, share.begin * BLOCK, end, layer.activation);
        }
    });
    OwnFactors gated = factors_of(me, work, layer.down, work.hidden_rows, width, num_rows);
    Coming last = begin_of(me, behind);
    work_then_rows(
        me, parts_of(me, layer.down),
        [&](int64_t part) { multiply_part(me, layer.down, gated.get(), work.fresh, part, last); },
        num_rows, each);
}

}  // namespace
