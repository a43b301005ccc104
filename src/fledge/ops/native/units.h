// How packed weights lie in memory: lanes are rows.
//
// A block is as many rows as a register has lanes, and a unit is what it has of 32 columns:
//
//   FOUR   words of eight columns, lane after lane; byte i of a word has column i, and 4 + i in its upper
//          half; w = step q + least
//   EIGHT  w = step q: column after column a signed byte a lane; or, where processors multiply bytes, words of
//          four columns, lane after lane, of q + 128
//   BRAIN  column after column, a bfloat16 a lane
//
// Steps of the rows lie side by side. Of the blocks of 32 rows each unit lies beside those of the others, so
// that memory is read from one end to the other. A step is the same for all columns of a unit, so codes are
// multiplied and summed up first, and their sum is multiplied with the step.
#pragma once

#include "tiles.h"

#if HAS_WIDE ? defined(__AVX512VNNI__) : defined(__AVXVNNI__)
#define HAS_BYTE_DOTS 1  // bytes times bytes are summed up without being rounded
#else
#define HAS_BYTE_DOTS 0
#endif

// AMD adds bytes beside its multipliers, so that half as many products of sums are worth it.
#if HAS_BYTE_DOTS && HAS_WIDE && (defined(__znver3__) || defined(__znver4__) || defined(__znver5__))
#define HAS_PAIRS 1
#else
#define HAS_PAIRS 0
#endif

constexpr int WORD_COLUMNS = 8;
constexpr int NEAR_UNITS = 8;  // of a few blocks, that take turns

INLINE V load_halves(const uint8_t* halves) {
#if HAS_WIDE
    return (V)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)halves));
#elif defined(__F16C__)
    return (V)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)halves));
#else
    float floats[LANES];
    for (int lane = 0; lane < LANES; lane++) floats[lane] = half_to_float(((const uint16_t*)halves)[lane]);
    return load(floats);
#endif
}

template <bool IS_HALF> struct FourBits {
    static constexpr int CODE_BYTES = LANES * UNIT / 2;
    static constexpr int STEP_BYTES = 2 * LANES * (IS_HALF ? 2 : 4);
    static constexpr int GROUPS = 1;
    static constexpr bool HAS_LEAST = true;

    static constexpr int nibble(int column) {
        return column < WORD_COLUMNS / 2 ? 2 * column : 2 * column - WORD_COLUMNS + 1;
    }
    // Column i of some eight.
    INLINE V column(const uint8_t* codes, int i) {
        typedef uint32_t Words __attribute__((vector_size(4 * LANES)));
        Words code;
        memcpy(&code, codes, sizeof(code));
        code >>= 4 * nibble(i);
        if (i < WORD_COLUMNS - 1) code &= 15;
        return __builtin_convertvector((VI)code, V);
    }
    INLINE V numbers(const uint8_t* steps, int which) {
        if (IS_HALF) return load_halves(steps + 2 * LANES * which);
        return load((const float*)steps + LANES * which);
    }
    INLINE V step(const uint8_t* steps, int) { return numbers(steps, 0); }
    INLINE V least(const uint8_t* steps) { return numbers(steps, 1); }
};

template <bool IS_FINE> struct EightBits {
    static constexpr int CODE_BYTES = LANES * UNIT;
    static constexpr int STEP_BYTES = IS_FINE ? 8 * LANES : 2 * LANES;
    static constexpr int GROUPS = IS_FINE ? 2 : 1;
    static constexpr bool HAS_LEAST = false;

    INLINE V column(const uint8_t* codes, int i) { return bytes_to_floats(codes + LANES * i); }
    INLINE V step(const uint8_t* steps, int group) {
        if (IS_FINE) return load((const float*)steps + LANES * group);
        return load_halves(steps);
    }
    INLINE V least(const uint8_t*) { return V{}; }
};

struct Brains {
    static constexpr int CODE_BYTES = 2 * LANES * UNIT;
    static constexpr int STEP_BYTES = 0;
    static constexpr int GROUPS = 1;
    static constexpr bool HAS_LEAST = false;

    INLINE V column(const uint8_t* codes, int i) { return brains_to_floats(codes + 2 * LANES * i); }
    INLINE V step(const uint8_t*, int) { return all_of(1.0f); }
    INLINE V least(const uint8_t*) { return V{}; }
};

template <int FORMAT> struct Unit;
template <> struct Unit<FOUR_HALF> : FourBits<true> {};
template <> struct Unit<FOUR_FLOAT> : FourBits<false> {};
template <> struct Unit<EIGHT_HALF> : EightBits<false> {};
template <> struct Unit<EIGHT_FINE> : EightBits<true> {};
template <> struct Unit<BRAIN> : Brains {};

// Which unit of a piece is that of a block.
INLINE int64_t place_of_unit(int64_t block, int64_t unit, int64_t num_units) {
    return (block / BESIDE * num_units + unit) * BESIDE + block % BESIDE;
}

// Where the code of a row and a column lies within the codes of a unit.
INLINE void place_four(uint32_t* words, int r, int column, uint32_t code) {
    words[column / WORD_COLUMNS * LANES + r] |= code << (4 * FourBits<true>::nibble(column % WORD_COLUMNS));
}
INLINE void place_eight(uint8_t* codes, int r, int column, int32_t code) {
#if HAS_BYTE_DOTS
    codes[4 * (column / 4 * LANES + r) + column % 4] = uint8_t(code + 128);
#else
    codes[LANES * column + r] = uint8_t(int8_t(code));
#endif
}
INLINE void place_brain(uint8_t* codes, int r, int column, uint16_t brain) {
    memcpy(codes + 2 * (LANES * column + r), &brain, 2);
}

// Packed weights that a thread will read behind those that it reads now.
struct Coming {
    const uint8_t *codes, *steps;
};

// Asks memory for the units of R blocks. The processor guesses what comes next too, but never beyond a page or
// another piece. The first cache waits for few lines at once, fewer than memory's delay asks for where products
// are fast: the second one waits for more.
constexpr int FIRST_CACHE = 3, SECOND_CACHE = 2;
template <typename U, int R, int CACHE> INLINE void ask_for_units(const uint8_t* codes, const uint8_t* steps) {
#pragma GCC unroll 16
    for (int line = 0; line < R * U::CODE_BYTES; line += 64) __builtin_prefetch(codes + line, 0, CACHE);
#pragma GCC unroll 8
    for (int line = 0; line < R * U::STEP_BYTES; line += 64) __builtin_prefetch(steps + line, 0, CACHE);
}

// Asks for the unit that is AHEAD_UNITS behind the one that is read; behind the last of some blocks for what comes.
constexpr int AHEAD_UNITS = 16;
template <typename U, int R> class Ahead {
  public:
    Ahead(const uint8_t* codes, const uint8_t* steps, int64_t num_units, const Coming& coming)
        : coming_(coming), num_left_(num_units - AHEAD_UNITS) {
        if (num_left_ > 0) begin({codes, steps}, AHEAD_UNITS);
        else begin(coming, -num_left_);
    }
    inline __attribute__((always_inline)) void ask() {
        ask_for_units<U, R, SECOND_CACHE>(codes_, steps_);
        codes_ += BESIDE * U::CODE_BYTES;
        steps_ += BESIDE * U::STEP_BYTES;
        if (--num_left_ == 0) begin(coming_, 0);
    }

  private:
    inline __attribute__((always_inline)) void begin(const Coming& from, int64_t unit) {
        codes_ = from.codes + unit * BESIDE * U::CODE_BYTES;
        steps_ = from.steps + unit * BESIDE * U::STEP_BYTES;
    }

    const Coming coming_;
    int64_t num_left_;  // units of these blocks that were not asked for
    const uint8_t *codes_, *steps_;
};

// Where the outputs of a block go, fewer at the end of a piece.
INLINE void put_block(float* y, V sums, int64_t count) {
    if (count >= BLOCK) return store(y, sums);
    for (int64_t i = 0; i < count; i++) y[i] = sums[i];
}
