// The largest of many products of each row, without keeping the products: a slice of them at a time
// stays near. Of equal ones the first counts, as everywhere.
#pragma once

#include "blocks.h"

struct Best {
    float value;  // no number where one of the products is none, or is not finite
    float sum;    // of e^(product - value), if asked for
    int64_t index;
};

namespace {

constexpr int SLICE_BLOCKS = SLICE / BLOCK;

INLINE Best nothing_yet() { return {-INFINITY, 0.0f, 0}; }

INLINE bool is_number(const Best& best) { return std::fabs(best.value) < INFINITY; }

// Of two parts of a row, of which `later` has the higher numbers.
INLINE Best better_of(const Best& best, const Best& later, bool has_sums) {
    if (std::isnan(best.value) || std::isnan(later.value)) return {NAN, NAN, 0};
    bool is_later = later.value > best.value;
    Best found = is_later ? later : best;
    if (!has_sums || found.value == -INFINITY) return found;
    const Best& other = is_later ? best : later;
    found.sum += other.sum * std::exp(other.value - found.value);
    return found;
}

// Its place is only looked for where the best is above what there is already.
static Best best_of_slice(const float* row, int64_t count, int64_t first, bool has_sums,
                          float above = -INFINITY) {
    V top = all_of(-INFINITY);
    VI is_good = ~VI{};
    int64_t i = 0, whole = count / LANES * LANES;
    for (; i < whole; i += LANES) {
        V v = load(row + i);
        top = larger_of(v, top);
        is_good &= v < INFINITY;
    }
    float best = largest(top);
    bool is_bad = !all_true(is_good);
    for (; i < count; i++) {
        best = row[i] > best ? row[i] : best;
        is_bad |= !(row[i] < INFINITY);
    }
    if (is_bad) return {NAN, NAN, 0};
    Best found = {best, 0.0f, first};
    if (best > above)
        while (found.index - first < count && row[found.index - first] != best) found.index++;
    if (!has_sums || best == -INFINITY) return found;
    V sum = {};
    for (i = 0; i < whole; i += LANES) sum += exponential(load(row + i) - best);
    found.sum = fold(sum);
    for (; i < count; i++) found.sum += std::exp(row[i] - best);
    return found;
}

// What is to be found out about the outputs of each row.
struct Search {
    bool has_sums;
    float* outputs;  // [rows, outputs]: all of them, if they are to be kept
};

// The best outputs of some blocks of a piece, for each row of x; they go on from what is there.
static void best_of_blocks(const Matrix& matrix, const Piece& piece, int64_t column,
                           const Factors& factors, Share blocks, const Search& search, Near& near,
                           Best* best) {
    int64_t num_rows = factors.num_rows;
    for (int64_t t = 0; t < num_rows; t += MOST_ROWS) {
        int64_t rows = num_rows - t < MOST_ROWS ? num_rows - t : MOST_ROWS;
        for (int64_t begin = blocks.begin; begin < blocks.end; begin += SLICE_BLOCKS) {
            int64_t end = begin + SLICE_BLOCKS < blocks.end ? begin + SLICE_BLOCKS : blocks.end;
            int64_t first = begin * BLOCK;
            int64_t last = end * BLOCK < piece.num_rows ? end * BLOCK : piece.num_rows;
            // The products of the slice begin where those of the whole matrix would have their place.
            multiply_piece(matrix, piece, column, factors.from(t), rows,
                           near.slice - column - first, SLICE, Share{begin, end},
                           units_of_block(piece, end, matrix.num_columns), near);
            for (int64_t r = 0; r < rows; r++) {
                const float* slice = near.slice + r * SLICE;
                best[t + r] = better_of(
                    best[t + r],
                    best_of_slice(slice, last - first, column + first, search.has_sums, best[t + r].value),
                    search.has_sums);
                if (search.outputs != nullptr)
                    memcpy(search.outputs + (t + r) * matrix.num_rows + column + first, slice,
                           size_t(last - first) * sizeof(float));
            }
        }
    }
}

// One part of so many of the best outputs of each row; parts are in the order of the outputs.
static void best_of_part(const Matrix& matrix, const Factors& factors, int64_t part,
                         int64_t num_parts, const Search& search, Near& near, Best* best) {
    for (int64_t t = 0; t < factors.num_rows; t++) best[t] = nothing_yet();
    Share share = share_of_blocks(blocks_of(matrix), part, num_parts);
    for_pieces(matrix, share, [&](const Piece& piece, int64_t column, Share blocks, bool) {
        best_of_blocks(matrix, piece, column, factors, blocks, search, near, best);
    });
}

// The best output of each row; `parts` has room for what each part finds. Then `after` goes on.
template <typename After>
void find_best(Member& me, const Matrix& matrix, const float* x, int64_t x_stride, int64_t num_rows,
               const Search& search, Best* parts, After after) {
    int64_t num_parts = me.parts_of(matrix.num_rows / UNIT);
    Near& near = near_of_thread();
    OwnFactors factors(matrix, x, x_stride, num_rows, near);
    me.work(
        num_parts,
        [&](int64_t part) {
            best_of_part(matrix, factors.get(), part, num_parts, search, near,
                         parts + part * num_rows);
        },
        [&] {
            for (int64_t part = 1; part < num_parts; part++)
                for (int64_t t = 0; t < num_rows; t++)
                    parts[t] = better_of(parts[t], parts[part * num_rows + t], search.has_sums);
            after(parts);
        });
}

}  // namespace
