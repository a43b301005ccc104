// What a decoder layer does beside its products and attention: where rows are, norms, rotations, gates. All in
// float32; every row is computed by itself, so its bits do not depend on the others.
#pragma once

#include "products.h"

struct Norm {
    const float* weight;  // nothing is normed without one
    float eps;
    int32_t is_one_plus;
};

// Where the keys and values of layers with one kind of attention are.
struct View {
    const int64_t* table;  // blocks of each request
    const int64_t* table_rows;  // its row in the table; the request's number where it is missing
    int64_t table_stride;
    int64_t block_size;
    int64_t window;  // 0 for none
};

// Rows of a pass: chains with trees below them, or the frontiers of growing trees (width > 0).
struct Rows {
    int64_t num_rows, num_requests;
    const int64_t* positions;
    const int64_t* starts;
    const int64_t* counts;
    const int64_t* context;
    const int64_t* chain;
    const int64_t* first;
    const uint8_t* seen;  // [requests, seen_rows, seen_columns]; may be missing
    int64_t seen_rows, seen_columns;
    int64_t width, first_number;
};

// What one row sees: all numbers of a range, and of those behind it the ones that are marked.
struct Row {
    int64_t request, number, position;
    int64_t first, end;
    int64_t marked_begin, num_marked;
    const uint8_t* marks;
};

static Row find_row(const Rows& rows, int64_t t, int64_t request) {
    Row row = {};
    row.request = request;
    row.position = rows.positions[t];
    int64_t context = rows.context[request];
    if (rows.width > 0) {
        int64_t own = t - request * rows.width;
        row.number = context + rows.seen_columns - rows.width + own;
        row.first = rows.first_number < context ? rows.first_number : context;
        row.end = row.marked_begin = context;
        row.num_marked = rows.seen_columns;
        row.marks = rows.seen + (request * rows.seen_rows + own) * rows.seen_columns;
        return row;
    }
    int64_t local = t - rows.starts[request], chain = rows.chain[request];
    row.number = context + local;
    row.first = rows.first[request];
    row.end = context + (local < chain ? local + 1 : chain);
    if (local >= chain && rows.seen != nullptr) {
        row.marked_begin = context + chain;
        row.num_marked = rows.counts[request] - chain;
        row.marks = rows.seen + (request * rows.seen_rows + local - chain + 1) * rows.seen_columns + 1;
    }
    return row;
}

INLINE const int64_t* blocks_of_request(const View& view, int64_t request) {
    int64_t row = view.table_rows == nullptr ? request : view.table_rows[request];
    return view.table + row * view.table_stride;
}

INLINE int64_t slot_of(const View& view, int64_t request, int64_t number) {
    int64_t block = blocks_of_request(view, request)[number / view.block_size];
    return block < 0 ? -1 : block * view.block_size + number % view.block_size;
}

// Slots of all keys that a row sees in one kind of attention; returns how many there are.
static int64_t find_slots(const Rows& rows, const View& view, const Row& row, int32_t* slots) {
    int64_t count = 0, first = row.first;
    if (view.window > 0 && row.position - view.window + 1 > first)
        first = row.position - view.window + 1;
    auto add = [&](int64_t number) {
        int64_t slot = slot_of(view, row.request, number);
        if (slot >= 0) slots[count++] = int32_t(slot);
    };
    const int64_t* blocks = blocks_of_request(view, row.request);
    for (int64_t number = first; number < row.end;) {
        int64_t place = number / view.block_size, block = blocks[place];
        int64_t end = (place + 1) * view.block_size < row.end ? (place + 1) * view.block_size : row.end;
        int64_t slot = block * view.block_size + number % view.block_size;
        for (; number < end; number++, slot++)
            if (block >= 0) slots[count++] = int32_t(slot);
    }
    for (int64_t i = 0; i < row.num_marked; i++) {
        if (!row.marks[i]) continue;
        if (view.window > 0) {
            int64_t context = rows.context[row.request];
            int64_t position = rows.width > 0
                ? context + i / rows.width
                : rows.positions[rows.starts[row.request] + rows.chain[row.request] + i];
            if (row.position - position >= view.window) continue;
        }
        add(row.marked_begin + i);
    }
    return count;
}

INLINE float squares(const float* x, int64_t size) {
    V sum = {};
    int64_t i = 0;
    for (; i + LANES <= size; i += LANES) {
        V v = load(x + i);
        sum += v * v;
    }
    if (i < size) {
        V v = load_some(x + i, size - i);
        sum += v * v;
    }
    return fold(sum);
}

static void norm_row(const float* x, const Norm& norm, const float* weight, int64_t size,
                     float* out) {
    float scale = 1.0f / std::sqrt(squares(x, size) / float(size) + norm.eps);
    for (int64_t i = 0; i < size; i++) {
        float factor = norm.is_one_plus ? 1.0f + weight[i] : weight[i];
        out[i] = factor * (x[i] * scale);
    }
}

INLINE void rotate(float* head, const float* cos, const float* sin, int64_t size) {
    int64_t half = size / 2;
    for (int64_t i = 0; i < half; i++) {
        float one = head[i], other = head[half + i];
        head[i] = one * cos[i] - other * sin[i];
        head[half + i] = other * cos[i] + one * sin[i];
    }
}

enum Activation : int32_t { SILU = 0, GELU_TANH = 1 };

INLINE V gate(V x, int activation) {
    V inner = x;
    if (activation == GELU_TANH)
        inner = 1.5957691216057308f * (x + 0.044715f * x * x * x);
    return x / (1.0f + exponential(-inner));
}

// act(gate) * up for columns [begin, end) of one row, into the gates.
static void gate_row(float* gates, const float* ups, int64_t begin, int64_t end, int activation) {
    int64_t i = begin;
    for (; i + LANES <= end; i += LANES)
        store(gates + i, gate(load(gates + i), activation) * load(ups + i));
    if (i < end) {
        float rest[LANES];
        store(rest, gate(load_some(gates + i, end - i), activation) *
                        load_some(ups + i, end - i));
        memcpy(gates + i, rest, size_t(end - i) * sizeof(float));
    }
}
