// Threads that work through the same phases. A phase is over when its parts are done, not when all
// threads have come: one that the system keeps from running holds up nobody unless it is in the
// middle of a part, and what it would have done is done by the others.
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

struct Phase {
    alignas(64) std::atomic<int64_t> next{0};
    alignas(64) std::atomic<int64_t> done{0};
    std::atomic<bool> is_over{false};
};

class Team {
  public:
    explicit Team(int64_t num_phases) : phases_(new Phase[size_t(num_phases)]) {}
    Phase& operator[](int64_t number) { return phases_[size_t(number)]; }

  private:
    std::unique_ptr<Phase[]> phases_;
};

// One thread of a team, and how far it is.
struct Member {
    Team& team;
    int thread, num_threads;
    int64_t phase = 0;

    // Parts of a phase in any order on any thread; whoever does the last one also does the rest.
    template <typename Part, typename Rest> void work(int64_t num_parts, Part part, Rest rest) {
        Phase& now = team[phase++];
        for (;;) {
            int64_t mine = now.next.fetch_add(1, std::memory_order_relaxed);
            if (mine >= num_parts) break;
            part(mine);
            if (now.done.fetch_add(1, std::memory_order_acq_rel) + 1 == num_parts) {
                rest();
                now.is_over.store(true, std::memory_order_release);
                return;
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
    // So many parts for so many things.
    int64_t parts_of(int64_t count) const {
        int64_t most = num_threads == 1 ? 1 : int64_t(num_threads) * PARTS_PER_THREAD;
        return count < most ? (count > 0 ? count : 1) : most;
    }
};

// Runs what every thread does, on as many threads as there really are.
template <typename Body> void on_threads(int64_t wanted, int64_t num_phases, Body body) {
    Team team(num_phases);
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
