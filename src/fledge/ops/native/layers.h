// What a decoder layer does beside its products: norms, rotations, attention over paged memory,
// gates. All in float32; every row is computed by itself, so its bits do not depend on the others.
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

INLINE float dot(const float* a, const float* b, int64_t size) {
    V sum = {};
    int64_t i = 0;
    for (; i + LANES <= size; i += LANES) sum += load(a + i) * load(b + i);
    if (i < size) sum += load_some(a + i, size - i) * load_some(b + i, size - i);
    return fold(sum);
}

template <int PARTS>
static void score_keys(const float* query, const float* keys, int64_t stride, const int32_t* slots,
                       int64_t count, float* scores) {
    V q[PARTS];
#pragma GCC unroll 16
    for (int p = 0; p < PARTS; p++) q[p] = load(query + p * LANES);
    int64_t i = 0;
    for (; i + 4 <= count; i += 4) {
        V sums[4] = {};
#pragma GCC unroll 4
        for (int j = 0; j < 4; j++) {
            const float* key = keys + slots[i + j] * stride;
#pragma GCC unroll 16
            for (int p = 0; p < PARTS; p++) sums[j] += q[p] * load(key + p * LANES);
        }
        *(UnalignedV4*)(scores + i) = fold4(sums[0], sums[1], sums[2], sums[3]);
    }
    for (; i < count; i++) {
        V sum = {};
        const float* key = keys + slots[i] * stride;
#pragma GCC unroll 16
        for (int p = 0; p < PARTS; p++) sum += q[p] * load(key + p * LANES);
        scores[i] = fold(sum);
    }
}

template <int PARTS>
static void mix_values(const float* probs, const float* values, int64_t stride,
                       const int32_t* slots, int64_t count, float scale, float* out) {
    V sums[PARTS] = {};
    for (int64_t i = 0; i < count; i++) {
        const float* value = values + slots[i] * stride;
#pragma GCC unroll 16
        for (int p = 0; p < PARTS; p++) sums[p] += load(value + p * LANES) * probs[i];
    }
#pragma GCC unroll 16
    for (int p = 0; p < PARTS; p++) store(out + p * LANES, sums[p] * scale);
}

// Scores to numbers that are proportional to probabilities; returns the sum of them.
static float exponentials(float* scores, int64_t count, float scale, float soft_cap) {
    V tops = all_of(-INFINITY);
    VI are_good = ~VI{};
    int64_t i = 0;
    for (; i + LANES <= count; i += LANES) {
        V score = load(scores + i) * scale;
        if (soft_cap > 0.0f)
            for (int lane = 0; lane < LANES; lane++)
                score[lane] = soft_cap * std::tanh(score[lane] / soft_cap);
        store(scores + i, score);
        tops = larger_of(score, tops);
        are_good &= score < INFINITY;
    }
    float top = largest(tops);
    bool is_bad = !all_true(are_good);
    for (; i < count; i++) {
        float score = scores[i] * scale;
        if (soft_cap > 0.0f) score = soft_cap * std::tanh(score / soft_cap);
        scores[i] = score;
        top = score > top ? score : top;
        is_bad |= !(score < INFINITY);
    }
    V sum = {};
    i = 0;
    for (; i + LANES <= count; i += LANES) {
        V probs = exponential(load(scores + i) - top);
        store(scores + i, probs);
        sum += probs;
    }
    if (i < count) {
        float rest[LANES];
        store(rest, exponential(load_some(scores + i, count - i) - top));
        memcpy(scores + i, rest, size_t(count - i) * sizeof(float));
        sum += load_some(rest, count - i);
    }
    return is_bad ? NAN : fold(sum);
}

struct Heads {
    int64_t num_heads, num_kv_heads, size;
    float scale, soft_cap;
};

// One head of one row over the keys at `slots`, of which there is at least its own.
static void attend(const Heads& heads, const float* query, int64_t head, const float* keys,
                   const float* values, const int32_t* slots, int64_t count, float* scores,
                   float* out) {
    int64_t size = heads.size, stride = heads.num_kv_heads * size;
    int64_t shift = head / (heads.num_heads / heads.num_kv_heads) * size;
    keys += shift;
    values += shift;
    switch (size) {
        case 64: score_keys<64 / LANES>(query, keys, stride, slots, count, scores); break;
        case 128: score_keys<128 / LANES>(query, keys, stride, slots, count, scores); break;
        default:
            for (int64_t i = 0; i < count; i++)
                scores[i] = dot(query, keys + slots[i] * stride, size);
    }
    float scale = 1.0f / exponentials(scores, count, heads.scale, heads.soft_cap);
    switch (size) {
        case 64: mix_values<64 / LANES>(scores, values, stride, slots, count, scale, out); break;
        case 128: mix_values<128 / LANES>(scores, values, stride, slots, count, scale, out); break;
        default:
            for (int64_t d = 0; d < size; d++) out[d] = 0.0f;
            for (int64_t i = 0; i < count; i++) {
                const float* value = values + slots[i] * stride;
                float prob = scores[i] * scale;
                for (int64_t d = 0; d < size; d++) out[d] += value[d] * prob;
            }
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
