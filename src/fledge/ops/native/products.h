// y = W x for a few rows x at once, over weights that lie in memory as few bits as they have.
//
// A matrix [N, K] is pieces of rows. A packed piece is blocks of rows, and a unit is what a block has
// of 32 columns: `units.h` says how it lies there. Steps are halves or floats
// (and for EIGHT they may be finer, one for each 16 columns), and are exactly those that the floats
// were made of. A row of a product has the same bits however many rows are beside it.
#pragma once

#include "dots.h"

struct Share {
    int64_t begin, end;
};

INLINE Share share_of(int64_t count, int64_t part, int64_t num_parts) {
    return {count * part / num_parts, count * (part + 1) / num_parts};
}

// Blocks from the first one on, of which there are no more than lie side by side, times T rows of x.
template <typename Kind, int T>
static void few_rows(const Piece& piece, const Factors& factors, int64_t first, const Blocks& blocks,
                     float* y, const Coming& coming) {
    for (int64_t block = first, end = first + blocks.count; block < end;) {
        int64_t left = end - block, beside = BESIDE - block % BESIDE;
        if (beside < left) left = beside;
        int64_t place = (block - first) * BLOCK;
#define BLOCKS(R)                                                                               \
    Kind::template multiply<R, T>(piece, factors, block, blocks.num_rows - place, y + place,    \
                                  blocks.y_stride, coming);                                     \
    block += R;
        if (BESIDE == 4 && left == 4) {
            BLOCKS(BESIDE)
        } else if (left >= 2) {
            BLOCKS(2)
        } else {
            BLOCKS(1)
        }
#undef BLOCKS
    }
}

template <typename Kind>
static void packed_rows(const Piece& piece, const Factors& factors, int num_rows, int64_t first,
                        const Blocks& blocks, const Coming& coming) {
    constexpr int MOST = Kind::MOST_ROWS;
    for (int begin = 0; begin < num_rows;) {
        int left = num_rows - begin, count = left <= MOST ? left : MOST;
        if (left > MOST && left < 2 * MOST) count = (left + 1) / 2;
        Factors own = factors.from(begin);
        float* y = blocks.y + begin * blocks.y_stride;
#define ROWS(T)                                                                    \
    case T:                                                                        \
        few_rows<Kind, T <= MOST ? T : 1>(piece, own, first, blocks, y, coming); \
        break;
        switch (count) {
            ROWS(1)
            ROWS(2)
            ROWS(3)
            ROWS(4)
            ROWS(5)
            ROWS(6)
            ROWS(7)
            ROWS(8)
        }
#undef ROWS
        begin += count;
    }
}

// Where the units of a block begin.
static Coming units_of_block(const Piece& piece, int64_t block, int64_t num_columns) {
    const uint8_t *codes = (const uint8_t*)piece.codes, *steps = (const uint8_t*)piece.steps;
    int64_t place = place_of_unit(block, 0, num_columns / UNIT);
#define UNITS(FORMAT) \
    case FORMAT: return {codes + place * Unit<FORMAT>::CODE_BYTES, steps + place * Unit<FORMAT>::STEP_BYTES};
    switch (piece.format) {
        UNITS(FOUR_HALF)
        UNITS(FOUR_FLOAT)
        UNITS(EIGHT_HALF)
        UNITS(EIGHT_FINE)
        UNITS(BRAIN)
        default: return {codes + block * BLOCK * num_columns * int64_t(sizeof(float)), codes};
    }
#undef UNITS
}

// Some blocks of the outputs of a piece, for at most MOST_ROWS rows of x.
static void piece_rows(const Piece& piece, int64_t num_columns, const Factors& factors, int num_rows,
                       float* y, int64_t y_stride, Share share, const Coming& coming, Near& near) {
    for (int64_t first = share.begin, end; first < share.end; first = end) {
        end = (first / NEAR_BLOCKS + 1) * NEAR_BLOCKS;
        if (share.end < end) end = share.end;
        Blocks blocks = {int(end - first), piece.num_rows - first * BLOCK, y + first * BLOCK,
                         y_stride};
        Coming next = end < share.end ? units_of_block(piece, end, num_columns) : coming;
#define PACKED(FORMAT)                                                                \
    case FORMAT:                                                                      \
        packed_rows<Products<FORMAT>>(piece, factors, num_rows, first, blocks, next); \
        break;
        switch (piece.format) {
            PACKED(FOUR_HALF)
            PACKED(FOUR_FLOAT)
            PACKED(EIGHT_HALF)
            PACKED(EIGHT_FINE)
            PACKED(BRAIN)
            default:
                float_rows((const float*)piece.codes + first * BLOCK * num_columns, num_columns,
                           factors.x, factors.stride, num_rows, near, blocks);
        }
#undef PACKED
    }
}

INLINE int64_t blocks_of(const Piece& piece) { return (piece.num_rows + BLOCK - 1) / BLOCK; }

// A part of some blocks; those that lie side by side stay together.
INLINE Share share_of_blocks(int64_t count, int64_t part, int64_t num_parts) {
    Share share = share_of((count + BESIDE - 1) / BESIDE, part, num_parts);
    int64_t begin = share.begin * BESIDE, end = share.end * BESIDE;
    return {begin < count ? begin : count, end < count ? end : count};
}

// Some blocks of one piece of x W^T + b, whose outputs begin at `column`.
static void multiply_piece(const Matrix& matrix, const Piece& piece, int64_t column,
                           const Factors& factors, int64_t num_rows, float* y, int64_t y_stride,
                           Share blocks, const Coming& coming, Near& near) {
    for (int64_t t = 0; t < num_rows; t += MOST_ROWS) {
        int rows = int(num_rows - t < MOST_ROWS ? num_rows - t : MOST_ROWS);
        piece_rows(piece, matrix.num_columns, factors.from(t), rows, y + t * y_stride + column,
                   y_stride, blocks, coming, near);
    }
    if (matrix.bias == nullptr) return;
    int64_t end = blocks.end * BLOCK < piece.num_rows ? blocks.end * BLOCK : piece.num_rows;
    for (int64_t t = 0; t < num_rows; t++)
        for (int64_t n = blocks.begin * BLOCK; n < end; n++)
            y[t * y_stride + column + n] += matrix.bias[column + n];
}

INLINE int64_t blocks_of(const Matrix& matrix) {
    int64_t count = 0;
    for (int p = 0; p < matrix.num_pieces; p++) count += blocks_of(matrix.pieces[p]);
    return count;
}

// Each piece of which a share of all blocks has some: the column where its outputs begin, its blocks, and whether
// the share goes on in the piece behind it.
template <typename Each> INLINE void for_pieces(const Matrix& matrix, Share share, Each each) {
    int64_t column = 0, before = 0;
    for (int p = 0; p < matrix.num_pieces; p++) {
        const Piece& piece = matrix.pieces[p];
        int64_t behind = before + blocks_of(piece);
        int64_t begin = share.begin > before ? share.begin : before;
        int64_t end = share.end < behind ? share.end : behind;
        if (begin < end) each(piece, column, Share{begin - before, end - before}, share.end > behind);
        before = behind;
        column += piece.num_rows;
    }
}

// Where one part of so many of a matrix begins.
static Coming units_of_part(const Matrix& matrix, int64_t part, int64_t num_parts) {
    int64_t num_blocks = blocks_of(matrix);
    Share rest = {share_of_blocks(num_blocks, part, num_parts).begin, num_blocks};
    Coming found = {};
    for_pieces(matrix, rest, [&](const Piece& piece, int64_t, Share blocks, bool) {
        if (found.codes == nullptr) found = units_of_block(piece, blocks.begin, matrix.num_columns);
    });
    return found;
}

// One part of so many of x W^T + b. Parts lie one behind the other.
static void multiply(const Matrix& matrix, const Factors& factors, float* y, int64_t y_stride,
                     int64_t part, int64_t num_parts, const Coming& coming, Near& near) {
    Share share = share_of_blocks(blocks_of(matrix), part, num_parts);
    for_pieces(matrix, share, [&](const Piece& piece, int64_t column, Share blocks, bool goes_on) {
        Coming next = goes_on ? units_of_block((&piece)[1], 0, matrix.num_columns) : coming;
        multiply_piece(matrix, piece, column, factors, factors.num_rows, y, y_stride, blocks, next, near);
    });
}
