// When sessions are expected back: how fast, and with which chance.
#pragma once
#include "arrays.hpp"

#include <algorithm>
#include <cmath>

namespace returns {

constexpr uint8_t RUNNING = 1, WAITING = 2, ENDED = 3;  // states, as in graph/types.py

// credit(states, last seen, expected returns, turns, inferred, reached, ended, prior, its strength, rows,
// now, memory, out): see graph/tables/returns.py
inline PyObject* credit(Arguments with, Py_ssize_t count) {
    expect(count, 13);
    Array<const uint8_t> state(with[0]);
    Array<const double> seen(with[1]), expected(with[2]);
    Array<const int32_t> turns(with[3]);
    Array<const uint8_t> inferred(with[4]);
    Array<const double> reached(with[5]), ended(with[6]), prior(with[7]);
    double strength = as_double(with[8]), now = as_double(with[10]), memory = as_double(with[11]);
    Array<const int32_t> rows(with[9]);
    Array<double> out(with[12]);
    size_t table = std::min({state.size(), seen.size(), expected.size(), turns.size(), inferred.size()});
    size_t most = prior.size();
    if (!most || out.size() != rows.size() || reached.size() != most + 1 || ended.size() != most + 1)
        raise_type_error("expected a place for each session, and as many counts as the prior has, and one");
    for (size_t at = 0; at < rows.size(); at++) {
        size_t row = (size_t)rows[at];
        if (rows[at] < 0) {  // no session
            out[at] = 0.0;
            continue;
        }
        if (row >= table) raise_type_error("a session is none of the table's");
        if (state[row] == RUNNING) {
            out[at] = 1.0;
        } else if (state[row] == ENDED) {
            out[at] = 0.0;
        } else if (state[row] == WAITING) {
            double due = std::max(expected[row], seen[row]);
            out[at] = std::exp(-std::max(0.0, now - (due + (due - seen[row]))) / memory);
        } else {
            size_t turn = (size_t)std::clamp<int64_t>((int64_t)turns[row] - 1, 0, (int64_t)most - 1);
            double counted = reached[turn] - (inferred[row] ? 0.0 : ended[turn]);
            double chance = (reached[turn + 1] + strength * prior[turn]) / (counted + strength);
            out[at] = std::min(chance, 1.0) * std::exp((seen[row] - now) / memory);
        }
    }
    return nothing();
}

// features(turns, tokens, written, grown, stop, states, expected returns, last seen, seven columns, two
// more, rows, out): see advisor/policies/waits.py
inline PyObject* features(Arguments with, Py_ssize_t count) {
    constexpr size_t SEVEN = 7, ALL = 15;
    expect(count, 19);
    Array<const int32_t> turns(with[0]), tokens(with[1]), written(with[2]), grown(with[3]);
    Array<const uint8_t> stop(with[4]), state(with[5]);
    Array<const double> expected(with[6]), seen(with[7]);
    Array<const float> columns[] = {
        Array<const float>(with[8]),  Array<const float>(with[9]),  Array<const float>(with[10]),
        Array<const float>(with[11]), Array<const float>(with[12]), Array<const float>(with[13]),
        Array<const float>(with[14]), Array<const float>(with[15]), Array<const float>(with[16])};
    Array<const int32_t> rows(with[17]);
    Array<float> out(with[18]);
    size_t table = std::min({turns.size(), tokens.size(), written.size(), grown.size(), stop.size(), state.size(),
                             expected.size(), seen.size()});
    for (const auto& column : columns) table = std::min(table, column.size());
    for (int32_t row : rows)
        if (row < 0 || (size_t)row >= table) raise_type_error("a session is none of the table's");
    if (out.size() != ALL * rows.size()) raise_type_error("expected a place for each session and feature");
    const float of_stop[] = {NAN, 1.0f, 0.0f, NAN};  // by StopReason
    for (size_t at = 0; at < rows.size(); at++) {
        size_t row = (size_t)rows[at];
        float* known = out.data() + ALL * at;
        double longer = std::log1p(std::fabs((double)grown[row]) / 10.0), pause = expected[row] - seen[row];
        bool is_stated = state[row] == WAITING && std::isfinite(pause);
        known[0] = (float)std::log((double)std::max(turns[row], 1));
        known[1] = (float)std::log((double)std::max(tokens[row] - written[row], 1));
        known[2] = (float)std::log1p((double)written[row]);
        known[3] = turns[row] < 2 ? NAN : (float)(grown[row] < 0 ? -longer : longer);
        for (size_t each = 0; each < SEVEN; each++) known[4 + each] = columns[each][row];
        known[11] = of_stop[stop[row] & 3];
        known[12] = columns[SEVEN][row];
        known[13] = columns[SEVEN + 1][row];
        known[14] = is_stated ? (float)std::log(std::max(pause, 0.01)) : NAN;
    }
    return nothing();
}

// gittins(rates, borders of the age bins, ages, best out): see advisor/policies/hazard.py. Rates are told
// wait after wait, one for each bin.
inline PyObject* gittins(Arguments with, Py_ssize_t count) {
    expect(count, 4);
    Array<const double> rates(with[0]), borders(with[1]), ages(with[2]);
    Array<double> best(with[3]);
    size_t n = ages.size(), bins = borders.size() - 1;
    if (borders.size() < 2 || best.size() != n || rates.size() != n * bins)
        raise_type_error("expected a rate for each wait and bin, and a place for each wait");
    {
        Unlocked unlocked(n * bins);
        const double *first = borders.begin(), *last = borders.end();
        for (size_t at = 0; at < n; at++) {
            const double *rate = rates.data() + at * bins, age = ages[at];
            size_t now = (size_t)std::max<int64_t>(1, std::upper_bound(first, last, age) - first) - 1;
            now = std::min(now, bins - 1);
            // Inside a bin the rate is interpolated towards the next bin's, so that no two ages tie.
            double moved = (age - borders[now]) / (borders[now + 1] - borders[now]);
            double own = std::pow(rate[now], 1.0 - moved) * std::pow(rate[std::min(now + 1, bins - 1)], moved);
            double sum = 0.0, before = 1.0, waited = 0.0, found = 0.0;
            for (size_t bin = now; bin < bins; bin++) {
                double speed = bin == now ? own : rate[bin], width = borders[bin + 1] - borders[bin];
                sum += speed * std::min(std::max(borders[bin + 1] - age, 0.0), width);
                double gone = std::exp(-sum);
                waited += (before - gone) / speed;
                before = gone;
                found = std::max(found, (1.0 - gone) / std::max(waited, 1e-9));
            }
            best[at] = found;
        }
    }
    return nothing();
}

}  // namespace returns
