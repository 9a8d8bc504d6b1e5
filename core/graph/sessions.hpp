// A session's turns, as they begin and end: what its row remembers of them.
#pragma once
#include "walks.hpp"

#include <algorithm>
#include <cmath>

namespace sessions {

using ingest::NO_ROW;
using ingest::row_of;

enum State : uint8_t { IDLE = 0, RUNNING = 1, WAITING_FOR_TOOL = 2, ENDED = 3 };  // types.SessionState
enum Stop : uint8_t { UNKNOWN = 0, TOOL_CALL = 1, END_OF_TURN = 2 };              // types.StopReason
constexpr double NEVER = -INFINITY;                                               // types.NEVER

// All chosen.
constexpr double LEAST_S = 0.01;     // of a pause
constexpr float SHARE = 0.2f;        // weight of the newest in an exponential mean
constexpr double GAP_SHARE = 0.3;    // weight of the newest gap in the mean

inline void move_mean(float& mean, float newest) {
    mean = std::isnan(mean) ? newest : mean + SHARE * (newest - mean);
}

// A session comes back after so many seconds; `turns` is still the number of turns before.
inline void note_pause(const Sessions& table, size_t row, double seconds) {
    float pause = (float)std::log(std::max(seconds, LEAST_S));
    float &last = table(&SessionColumns::last_pause)[row], &second = table(&SessionColumns::second_pause)[row],
          &mean = table(&SessionColumns::mean_pause)[row], &longest = table(&SessionColumns::longest_pause)[row];
    table(&SessionColumns::third_pause)[row] = second;
    second = last;
    last = pause;
    mean = std::isnan(mean) ? pause : mean + (pause - mean) / (float)table(&SessionColumns::turns)[row];
    if (!(longest >= pause)) longest = pause;  // also where there was none
    move_mean(table(&SessionColumns::recent_pause)[row], pause);
    uint8_t stop = table(&SessionColumns::stop)[row];
    if (stop == TOOL_CALL) move_mean(table(&SessionColumns::tool_pause)[row], pause);
    if (stop == END_OF_TURN) move_mean(table(&SessionColumns::other_pause)[row], pause);
}

// A request of a session enters an engine. `reach`: blocks of its prompt, `tip`: the row of its last one; -1: not
// known, or none.
struct Begun {
    bool at_rest;  // it is the first request of a turn: what follows is of the moment before
    int was, before, waited_for;
    double away;

    Begun(const Sessions& table, size_t row, int64_t engine, double now, int64_t tokens, int64_t reach, int64_t tip) {
        auto state = table(&SessionColumns::state);
        auto running = table(&SessionColumns::running), turns = table(&SessionColumns::turns),
             tool = table(&SessionColumns::tool);
        auto last_seen = table(&SessionColumns::last_seen);
        if (row >= ingest::least(state, running, turns, tool, last_seen))
            raise_type_error("a row is none of the table's");
        if (reach >= 0) {
            table(&SessionColumns::reach)[row] = (int32_t)reach;
            if (!turns[row]) table(&SessionColumns::first_reach)[row] = (int32_t)reach;
        }
        at_rest = !running[row];
        was = state[row], before = turns[row], waited_for = tool[row];
        away = now - last_seen[row];
        if (at_rest) {
            if (turns[row]) {
                note_pause(table, row, away);
                float& gap = table(&SessionColumns::gap)[row];
                gap = (float)(gap == 0 ? away : (double)gap + GAP_SHARE * (away - (double)gap));
                tool[row] = NO_ROW;
            }
            table(&SessionColumns::started)[row] = now;
            int32_t &known = table(&SessionColumns::tokens)[row], &asked = table(&SessionColumns::asked)[row],
                    &longer = table(&SessionColumns::longer)[row];
            table(&SessionColumns::grown)[row] = turns[row] ? (int32_t)(tokens - known) : 0;
            longer = turns[row] && tokens > asked ? longer + 1 : 0;
            known = asked = (int32_t)tokens;
            turns[row]++;
        }
        running[row]++;
        table(&SessionColumns::engine)[row] = (int8_t)engine;
        state[row] = RUNNING;
        table(&SessionColumns::expected_return)[row] = NEVER;
        last_seen[row] = now;
        if (tip >= 0) table(&SessionColumns::tip)[row] = (int32_t)tip;
    }
    // None, or, as the first request of a turn, (the state it was in, its turns before, the seconds that it was
    // away, the tool that it waited for)
    PyObject* told() const {
        return at_rest ? Py_BuildValue("(iidi)", was, before, away, waited_for) : nothing();
    }
};

// A request of a session left the engine; returns whether the session rests, and was said to be over.
inline bool ended(const Sessions& table, size_t row, int64_t tip, double now, int64_t prompt, int64_t total) {
    auto state = table(&SessionColumns::state);
    auto running = table(&SessionColumns::running);
    if (row >= ingest::least(state, running)) raise_type_error("a row is none of the table's");
    int32_t written = (int32_t)std::max<int64_t>(0, total - prompt);
    table(&SessionColumns::written)[row] = written;
    move_mean(table(&SessionColumns::mean_written)[row], (float)std::log1p((double)written));
    table(&SessionColumns::stop)[row] = UNKNOWN;
    table(&SessionColumns::tokens)[row] = (int32_t)total;
    running[row] = std::max(0, running[row] - 1);
    bool was_over = !running[row] && state[row] == ENDED;
    if (!running[row]) state[row] = IDLE;
    table(&SessionColumns::tip)[row] = (int32_t)tip;
    table(&SessionColumns::last_seen)[row] = now;
    return was_over;
}

inline int64_t last_of(const Array<const int32_t>& rows) { return rows.size() ? rows[rows.size() - 1] : NO_ROW; }

// begin_turn(sessions, row, engine, now, prompt tokens, blocks of the prompt, row of its last block) -> as told
inline PyObject* begin_turn(Arguments with, Py_ssize_t count) {
    expect(count, 7);
    Sessions table(with[0]);
    size_t row = row_of(with[1], table(&SessionColumns::state).size);
    return Begun(table, row, as_integer(with[2]), as_double(with[3]), as_integer(with[4]), as_integer(with[5]),
                 as_integer(with[6])).told();
}

// end_turn(sessions, row, row of the last block, now, prompt tokens, tokens with the answer) -> as `ended`
inline PyObject* end_turn(Arguments with, Py_ssize_t count) {
    expect(count, 6);
    Sessions table(with[0]);
    size_t row = row_of(with[1], table(&SessionColumns::state).size);
    return PyBool_FromLong(
        ended(table, row, as_integer(with[2]), as_double(with[3]), as_integer(with[4]), as_integer(with[5])));
}

// begin_walk(blocks, sessions, row, rows, engine, now, prompt tokens, whether its whole prompt is known) ->
// (how many blocks of its last turn the session abandoned, as of begin_turn): it walks these rows. A prompt beside
// the last turn abandons nothing, and is not what the session's next one is compared with.
inline PyObject* begin_walk(Arguments with, Py_ssize_t count) {
    expect(count, 8);
    Blocks blocks(with[0]);
    Sessions table(with[1]);
    size_t row = row_of(with[2], ingest::least(table(&SessionColumns::running), table(&SessionColumns::tip),
                                               table(&SessionColumns::reach)));
    Array<const int32_t> rows(with[3]);
    int64_t engine = as_integer(with[4]), tokens = as_integer(with[6]);
    double now = as_double(with[5]);
    bool whole = PyObject_IsTrue(with[7]) == 1, beside = whole && ingest::is_beside(blocks, table, rows, row);
    size_t left = whole ? ingest::supersede_rows(blocks, table, rows, row, beside) : 0;
    ingest::own_rows(blocks, rows, (int32_t)row);
    Begun begun(table, row, engine, now, tokens, whole && !beside ? (int64_t)rows.size() : -1,
                last_of(rows));
    return Py_BuildValue("(nN)", (Py_ssize_t)left, begun.told());
}

// end_walk(blocks, sessions, row, rows, now, prompt tokens, tokens with the answer) -> as `ended`: it walked
// these rows
inline PyObject* end_walk(Arguments with, Py_ssize_t count) {
    expect(count, 7);
    Blocks blocks(with[0]);
    Sessions table(with[1]);
    size_t row = row_of(with[2], table(&SessionColumns::state).size);
    Array<const int32_t> rows(with[3]);
    ingest::own_rows(blocks, rows, (int32_t)row);
    return PyBool_FromLong(
        ended(table, row, last_of(rows), as_double(with[4]), as_integer(with[5]), as_integer(with[6])));
}

}  // namespace sessions
