// Which drafts of chains the target keeps: its own token behind each row, drawn or the best, for as
// long as the drafts say the same. Rows behind the first draft that differs are not looked at.
#pragma once

#include "best.h"
#include "draws.h"
#include "team.h"

struct Walk {
    const float* logits;  // [rows, columns]
    int64_t num_columns, num_requests;
    const int64_t* starts;  // the first row of each request, and how many it has
    const int64_t* counts;
    const int64_t* tokens;  // of the rows: the draft behind a row is the token of the next
    const Draw* draws;      // [requests]: at their first rows
    int64_t* said;  // [rows]: on the way, a token, UNSURE, or NO_TOKEN where logits are no numbers
};

namespace {

constexpr int64_t NO_TOKEN = -1;
constexpr int64_t PHASES_OF_WALK_LEVEL = 3;
constexpr int64_t COLUMNS_OF_PART = 1024;  // at least, where a row is shared

// What a part of a row says of it.
struct Glance {
    Best best;
    Drawn drawn;
    double weight;
};

// Every level has numbers of its own: a thread that comes late still looks at those of its level.
struct WalkRoom {
    Glance* glances;  // [requests on the way, parts]: the first of each has the best of its row
    int64_t* walking;  // [levels + 1, requests]: who is on the way
    int64_t* num_walking;  // [levels + 1]
    int64_t num_requests;

    int64_t* at(int64_t level) const { return walking + level * num_requests; }
};

struct Walker {
    const Walk& walk;
    int64_t request, level;

    int64_t at() const { return walk.starts[request] + level; }
    const float* row() const { return walk.logits + at() * walk.num_columns; }
    const Draw& draw() const { return walk.draws[request]; }
    bool draws() const { return draw().temperature > 0.0; }
    Scale scale(const Best& best) const { return {double(best.value), draw().temperature}; }
    Noise noise() const { return Noise(draw().seed, draw().position + level); }
};

void look_at_part(const Walker& walker, const Best& best, Share columns, Glance& found) {
    if (!walker.draws() || !is_number(best)) return;
    Scale scale = walker.scale(best);
    if (!scale.is_usual()) return;
    Noise noise = walker.noise();
    found.drawn = draw_among(walker.row(), columns, scale, noise, BELOW_ALL, noise.of(best.index));
    bool has_top_p = walker.draw().top_p < 1.0 && walker.draw().top_k == 0;
    found.weight = has_top_p ? rough_weight(walker.row(), columns, scale) : 0.0;
}

int64_t token_of(const Walker& walker, const Glance* parts, int64_t num_parts) {
    const Best& best = parts[0].best;
    if (!is_number(best)) return NO_TOKEN;
    if (!walker.draws()) return best.index;
    if (!walker.scale(best).is_usual()) return UNSURE;
    Drawn drawn = NOTHING_DRAWN;
    double weight = 0.0;
    for (int64_t part = 0; part < num_parts; part++) {
        drawn.add(parts[part].drawn);
        weight += parts[part].weight;
    }
    Choice choice = {walker.row(),  walker.walk.num_columns, walker.scale(best),
                     walker.draw(), weight,                  true};
    return choose_token(choice, walker.noise(), drawn);
}

// Those whose next draft is what the target says go on.
void go_on(const Walk& walk, WalkRoom& room, int64_t level) {
    int64_t count = 0;
    for (int64_t i = 0; i < room.num_walking[level]; i++) {
        Walker walker = {walk, room.at(level)[i], level};
        bool has_next = level + 1 < walk.counts[walker.request];
        if (has_next && walk.said[walker.at()] == walk.tokens[walker.at() + 1])
            room.at(level + 1)[count++] = walker.request;
    }
    room.num_walking[level + 1] = count;
}

void run_walk(Member& me, const Walk& walk, WalkRoom& room) {
    int64_t parts = me.parts_of(walk.num_columns / COLUMNS_OF_PART);
    for (int64_t level = 0; room.num_walking[level] > 0; level++) {
        int64_t count = room.num_walking[level];
        auto part_of = [&](int64_t i) { return share_of(walk.num_columns, i % parts, parts); };
        auto walker_of = [&](int64_t i) { return Walker{walk, room.at(level)[i], level}; };
        me.work(
            count * parts,
            [&](int64_t i) {
                Share columns = part_of(i);
                room.glances[i].best =
                    best_of_slice(walker_of(i / parts).row() + columns.begin,
                                  columns.end - columns.begin, columns.begin, false);
            },
            [&] {
                for (int64_t i = 0; i < count * parts; i++) {
                    Best& best = room.glances[i / parts * parts].best;
                    if (i % parts != 0) best = better_of(best, room.glances[i].best, false);
                }
            });
        me.work(count * parts, [&](int64_t i) {
            look_at_part(walker_of(i / parts), room.glances[i / parts * parts].best, part_of(i),
                         room.glances[i]);
        });
        me.work(
            count,
            [&](int64_t i) {
                Walker walker = walker_of(i);
                walk.said[walker.at()] = token_of(walker, room.glances + i * parts, parts);
            },
            [&] { go_on(walk, room, level); });
    }
}

}  // namespace
