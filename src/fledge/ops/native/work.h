// What a decoder is made of, and the memory that a pass over a few rows works in.
#pragma once

#include "attention.h"

#include <new>
#include <vector>

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
    FactorUnit* units;  // of one product at a time, where there are many rows
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

// Rows from which on what lies between two products is shared out too.
constexpr int64_t MANY_ROWS = 16;

int64_t most_units(const Decoder& decoder) {
    return widest(decoder, [](const Layer& l) {
        int64_t most = 0;
        for (const Matrix* one : {&l.qkv, &l.out, &l.gate_up, &l.down})
            most = one->num_columns > most ? one->num_columns : most;
        return most / UNIT;
    });
}

// `num_ahead` rows more than these may be seen by rows that come later.
Work begin_work(const Decoder& decoder, const Rows& rows, const View* views, int64_t num_views,
                int num_threads, int64_t num_ahead = 0) {
    static thread_local std::vector<Row> found;
    found.resize(size_t(rows.num_rows));
    Work work = {};
    work.rows = &rows;
    work.views = views;
    work.num_views = num_views;
    work.hidden = decoder.hidden_size;
    work.row = found.data();
    work.longest = (requests_of_rows(rows, work.row) + num_ahead + 15) / 16 * 16;
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
    size_t scores = room.keep<float>(work.longest * MOST_HEADS * num_threads);
    size_t input = room.keep<float>(count * 2 * decoder.hidden_size);
    size_t units = room.keep<FactorUnit>(count > MANY_ROWS ? count * most_units(decoder) : 0);
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
    work.units = room.at<FactorUnit>(units);
    return work;
}

}  // namespace
