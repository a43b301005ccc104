// The largest of many products of each row, most of which are never made in full.
//
// The highest digits of x say a product up to the length of a row of weights times that of what the other digits
// leave of x. Where that is too little to be the largest one, nothing more is asked for; the others are made as
// everywhere, so that the largest is the same and of equal ones the first. A third of the work where rows are
// many enough to be bound by it.
#pragma once

#include "best.h"

namespace {

// With fewer rows reading the weights takes as long as multiplying them.
constexpr int64_t SCREENED_ROWS = 4;
// Where more than a fourth of all blocks may have the largest product, making them all is less work, and so it
// will be for the next searches: texts change slowly.
constexpr int64_t MOST_MADE = 4;
constexpr int64_t SEARCHES_WITHOUT = 32;

// A block of products of a row of x that may have its largest one, which is no larger than `most`.
struct Candidate {
    int32_t row, block;
    float most;
};

// What the parts of a search have found.
struct Screened {
    std::vector<std::vector<Candidate>> candidates;
    std::vector<float> least;  // [rows]: the largest product is at least so large
    int64_t num_made = 0;      // blocks of one row, in this search
    int64_t num_without = 0;   // searches to come that are not screened
};

// Threads tell each other how large the largest product is at least. One that misses a word looks at more blocks.
INLINE float told(const float& least) {
    float found;
    __atomic_load(&least, &found, __ATOMIC_RELAXED);
    return found;
}
INLINE void tell(float& least, float found) {
    if (found > told(least)) __atomic_store(&least, &found, __ATOMIC_RELAXED);
}

#if HAS_BYTE_DOTS

bool can_screen(const Matrix& matrix) {
    const Piece& piece = matrix.pieces[0];
    bool has_bytes = piece.format == EIGHT_HALF || piece.format == EIGHT_FINE;
    return matrix.lengths != nullptr && matrix.num_pieces == 1 && matrix.bias == nullptr && has_bytes &&
           piece.num_rows % BLOCK == 0;
}

// How long what the highest digits leave of a row of x may be, with what floats round on the way, also where
// squares are too small for floats: rows of weights are said to be longer by as much.
float length_left(const Factors& factors, int64_t row) {
    typedef int8_t Digits __attribute__((vector_size(LANES)));
    const FactorUnit* units = factors.units + row * factors.num_units;
    V left = {}, whole = {};
    for (int64_t u = 0; u < factors.num_units; u++)
        for (int at = 0; at < UNIT; at += LANES) {
            Digits middle, low;
            memcpy(&middle, units[u].digits[1] + at, LANES);
            memcpy(&low, units[u].digits[2] + at, LANES);
            VI rest = __builtin_convertvector(middle, VI) * 256 + __builtin_convertvector(low, VI);
            V part = __builtin_convertvector(rest, V) * units[u].scale;
            V x = load(factors.x + row * factors.stride + u * UNIT + at);
            left += part * part;
            whole += x * x;
        }
    float rounded = float(factors.num_units + 8) * 0x1p-22f;
    return 1.001f * (std::sqrt(fold(left)) + rounded * std::sqrt(fold(whole))) + 1e-15f;
}

// The highest digits' products of some blocks that lie side by side.
void multiply_highest(const Piece& piece, const Factors& factors, int64_t num_columns, Share blocks, float* y,
                      int64_t y_stride) {
    Coming next = units_of_block(piece, blocks.end, num_columns);
    Blocks some = {int(blocks.end - blocks.begin), piece.num_rows - blocks.begin * BLOCK, y, y_stride};
    if (piece.format == EIGHT_HALF)
        packed_rows<HighestDigits<EIGHT_HALF>>(piece, factors, int(factors.num_rows), blocks.begin, some, next);
    else
        packed_rows<HighestDigits<EIGHT_FINE>>(piece, factors, int(factors.num_rows), blocks.begin, some, next);
}

// Which blocks of one part may have the largest product of a row, and how large that is at least.
void screen_part(const Matrix& matrix, const Factors& factors, Share blocks, const float* left, Near& near,
                 std::vector<Candidate>& found, float* least) {
    const Piece& piece = matrix.pieces[0];
    int64_t count = factors.num_rows;
    found.clear();
    for (int64_t begin = blocks.begin, end; begin < blocks.end; begin = end) {
        end = (begin / NEAR_BLOCKS + 1) * NEAR_BLOCKS;
        if (blocks.end < end) end = blocks.end;
        multiply_highest(piece, factors, matrix.num_columns, Share{begin, end}, near.slice, SLICE);
        for (int64_t t = 0; t < count; t++) {
            float known = told(least[t]);
            for (int64_t block = begin; block < end; block++) {
                V about = load(near.slice + t * SLICE + (block - begin) * BLOCK);
                V unsure = load(matrix.lengths + block * BLOCK) * left[t];
                V most = about + unsure;
                if (all_true(most < known)) continue;  // what is no number is looked at
                V number = most == most ? most : all_of(INFINITY);
                found.push_back({int32_t(t), int32_t(block), largest(number)});
                float sure = largest(about - unsure);
                if (sure > known) tell(least[t], known = sure);
            }
        }
    }
}

// The best of what one part has found, made in full; returns how many blocks that were.
int64_t make_candidates(const Matrix& matrix, const Factors& factors, const std::vector<Candidate>& found,
                        const float* least, Near& near, Best* best) {
    const Piece& piece = matrix.pieces[0];
    int64_t num_made = 0;
    for (int64_t t = 0; t < factors.num_rows; t++) best[t] = nothing_yet();
    for (const Candidate& one : found) {
        if (one.most < told(least[one.row])) continue;
        num_made++;
        int64_t first = one.block * int64_t(BLOCK);
        Share block = {one.block, one.block + 1};
        multiply_piece(matrix, piece, 0, factors.from(one.row), 1, near.slice - first, SLICE, block,
                       units_of_block(piece, one.block, matrix.num_columns), near);
        Best& known = best[one.row];
        known = better_of(known, best_of_slice(near.slice, BLOCK, first, false, known.value), false);
    }
    return num_made;
}

// The best output of each row; `parts` has room for what each part finds. Then `after` goes on.
template <typename After>
void find_best_screened(Member& me, const Matrix& matrix, const float* x, int64_t x_stride, int64_t num_rows,
                        Screened& screened, Best* parts, After after) {
    int64_t num_parts = me.parts_of(matrix.num_rows / UNIT), num_blocks = blocks_of(matrix);
    Near& near = near_of_thread();
    OwnFactors factors(matrix, x, x_stride, num_rows, near);
    float left[MOST_ROWS];
    bool knows_left = false;
    me.work(
        num_parts,
        [&](int64_t part) {
            const Factors& own = factors.get();
            for (int64_t t = 0; t < num_rows && !knows_left; t++) left[t] = length_left(own, t);
            knows_left = true;
            screen_part(matrix, own, share_of_blocks(num_blocks, part, num_parts), left, near,
                        screened.candidates[size_t(part)], screened.least.data());
        });
    me.work(
        num_parts,
        [&](int64_t part) {
            int64_t num_made = make_candidates(matrix, factors.get(), screened.candidates[size_t(part)],
                                               screened.least.data(), near, parts + part * num_rows);
            __atomic_fetch_add(&screened.num_made, num_made, __ATOMIC_RELAXED);
        },
        [&] {
            if (screened.num_made * MOST_MADE > num_blocks * num_rows) screened.num_without = SEARCHES_WITHOUT;
            for (int64_t part = 1; part < num_parts; part++)
                for (int64_t t = 0; t < num_rows; t++)
                    parts[t] = better_of(parts[t], parts[part * num_rows + t], false);
            after(parts);
        });
}

#else

bool can_screen(const Matrix&) { return false; }

template <typename After>
void find_best_screened(Member&, const Matrix&, const float*, int64_t, int64_t, Screened&, Best*, After) {}

#endif

// Room for what is found of so many rows, in at most so many parts.
Screened& room_for_screened(int64_t num_rows, int64_t num_threads) {
    static thread_local Screened room;
    size_t num_parts = size_t(num_threads * PARTS_PER_THREAD);
    if (room.candidates.size() < num_parts) room.candidates.resize(num_parts);
    room.least.assign(size_t(num_rows), -INFINITY);
    room.num_made = 0;
    return room;
}

// Whether a search is to be screened, asked once for each.
bool begin_screened(const Matrix& matrix, int64_t num_rows, Screened& room) {
    if (num_rows < SCREENED_ROWS || num_rows > MOST_ROWS || !can_screen(matrix)) return false;
    if (room.num_without == 0) return true;
    room.num_without--;
    return false;
}

}  // namespace
