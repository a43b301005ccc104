// Threads that work through the same phases. A phase is over when its parts are done, not when all
// threads have come: one that the system keeps from running holds up nobody unless it is in the
// middle of a part, and what it would have done is done by the others.
//
// Every thread begins with parts that lie one behind the other, and then helps the others: what it
// asks memory for ahead of time is then what it needs next, and what it wrote is near.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>

#if defined(_OPENMP)
#include <omp.h>
#endif
#if defined(__x86_64__)
#include <immintrin.h>
#endif
#include <sched.h>

constexpr int PATIENCE = 400;  // looks at a phase before others are let run
constexpr int PARTS_PER_THREAD = 4;
constexpr int64_t MOST_RANGES = 16;

struct alignas(64) Count {
    std::atomic<int64_t> value{0};
};

struct Phase {
    alignas(64) std::atomic<int64_t> done{0};
    std::atomic<bool> is_over{false};
};

class Team {
  public:
    Team(int64_t num_threads, int64_t num_phases)
        : num_ranges(num_threads < MOST_RANGES ? num_threads : MOST_RANGES),
          phases_(new Phase[size_t(num_phases)]),
          next_(new Count[size_t(num_phases * num_ranges)]) {}
    Phase& operator[](int64_t number) { return phases_[size_t(number)]; }
    // Parts of a range that somebody has begun.
    std::atomic<int64_t>& next(int64_t number, int64_t range) {
        return next_[size_t(number * num_ranges + range)].value;
    }
    const int64_t num_ranges;  // into which the parts of a phase are split

  private:
    std::unique_ptr<Phase[]> phases_;
    std::unique_ptr<Count[]> next_;
};

// One thread of a team, and how far it is.
struct Member {
    Team& team;
    int thread, num_threads;
    int64_t phase = 0;

    // Parts of a phase in any order on any thread; whoever does the last one also does the rest.
    template <typename Part, typename Rest> void work(int64_t num_parts, Part part, Rest rest) {
        int64_t number = phase++, count = team.num_ranges;
        Phase& now = team[number];
        for (int64_t turn = 0; turn < count; turn++) {
            int64_t range = (thread + turn) % count;
            int64_t begin = num_parts * range / count, end = num_parts * (range + 1) / count;
            std::atomic<int64_t>& next = team.next(number, range);
            for (;;) {
                int64_t mine = begin + next.fetch_add(1, std::memory_order_relaxed);
                if (mine >= end) break;
                part(mine);
                if (now.done.fetch_add(1, std::memory_order_acq_rel) + 1 == num_parts) {
                    rest();
                    now.is_over.store(true, std::memory_order_release);
                    return;
                }
            }
        }
        for (int looks = 0; !now.is_over.load(std::memory_order_acquire); looks++) {
            if (looks > PATIENCE) sched_yield();
#if defined(__x86_64__)
            else _mm_pause();
#endif
        }
    }
    template <typename Part> void work(int64_t num_parts, Part part) {
        work(num_parts, part, [] {});
    }
    // Which part this thread begins with, and whether it comes to the end of its own with one.
    int64_t first_part(int64_t num_parts) const { return num_parts * (thread % team.num_ranges) / team.num_ranges; }
    bool is_own_last(int64_t part, int64_t num_parts) const {
        return part + 1 == num_parts * (thread % team.num_ranges + 1) / team.num_ranges;
    }
    // So many parts for so many things.
    int64_t parts_of(int64_t count) const {
        int64_t most = num_threads == 1 ? 1 : int64_t(num_threads) * PARTS_PER_THREAD;
        return count < most ? (count > 0 ? count : 1) : most;
    }
};

// Runs what every thread does, on as many threads as there really are.
template <typename Body> void on_threads(int64_t wanted, int64_t num_phases, Body body) {
    Team team(wanted > 0 ? wanted : 1, num_phases);
#if defined(_OPENMP)
#pragma omp parallel num_threads(int(wanted))
    {
        Member member{team, omp_get_thread_num(), omp_get_num_threads()};
        body(member);
    }
#else
    (void)wanted;
    Member member{team, 0, 1};
    body(member);
#endif
}
