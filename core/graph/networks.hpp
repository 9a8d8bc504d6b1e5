// The parts of small networks that are neither a product of matrices nor an exponential, which are
// numpy's: see advisor/policies/hazard.py. Arrays of single precision, [networks, waits, units] or
// [networks, 1, units], are told flat.
#pragma once
#include "arrays.hpp"

#include <algorithm>
#include <cmath>
#include <optional>

namespace networks {

using Singles = Array<float>;
using GivenSingles = Array<const float>;

inline float bounded(float value, float least, float most) {
    return value < least ? least : (value > most ? most : value);  // NaN stays
}

// inputs(features, [means, spreads], farthest, out): of each wait the standardised features, 0 where one
// is not known, and then whether each is known
inline PyObject* inputs(Arguments with, Py_ssize_t count) {
    expect(count, 4);
    GivenSingles features(with[0]), scales(with[1]);
    float far = (float)as_double(with[2]);
    Singles out(with[3]);
    size_t width = scales.size() / 2, waits = width ? features.size() / width : 0;
    if (features.size() != waits * width || out.size() != 2 * features.size())
        raise_type_error("features, their scales and the room for inputs do not fit each other");
    for (size_t wait = 0; wait < waits; wait++) {
        const float* own = features.data() + wait * width;
        float* to = out.data() + 2 * wait * width;
        for (size_t each = 0; each < width; each++) {
            bool known = !std::isnan(own[each]);
            float scaled = known ? (own[each] - scales[each]) / scales[width + each] : 0.0f;
            to[each] = bounded(scaled, -far, far);
            to[width + each] = known ? 1.0f : 0.0f;
        }
    }
    return nothing();
}

// biased(lines in place, bases, units, least, most, out or None): the bases are added to the lines. Out come
// these, bounded and negated, whose exponentials `swish` asks for; without, they are bounded themselves.
inline PyObject* biased(Arguments with, Py_ssize_t count) {
    expect(count, 6);
    Singles lines(with[0]);
    GivenSingles bases(with[1]);
    size_t units = (size_t)as_integer(with[2]);
    float least = (float)as_double(with[3]), most = (float)as_double(with[4]);
    std::optional<Singles> out;
    if (with[5] != Py_None) out.emplace(with[5]);
    if (!units || !bases.size() || bases.size() % units || lines.size() % bases.size() ||
        (out && out->size() != lines.size()))
        raise_type_error("lines, bases and units do not fit each other, or the room for what comes out");
    size_t networks = bases.size() / units, rows = lines.size() / bases.size();
    for (size_t row = 0; row < networks * rows; row++) {
        const float* base = bases.data() + row / rows * units;
        float* __restrict own = lines.data() + row * units;
        float* __restrict negated = out ? out->data() + row * units : nullptr;
        for (size_t unit = 0; unit < units; unit++) own[unit] += base[unit];
        if (negated)
            for (size_t unit = 0; unit < units; unit++) negated[unit] = -bounded(own[unit], least, most);
        else
            for (size_t unit = 0; unit < units; unit++) own[unit] = bounded(own[unit], least, most);
    }
    return nothing();
}

// swish(lines in place, exponentials in place): these become x / (1 + exp(-x)), and the lines its slope.
inline PyObject* swish(Arguments with, Py_ssize_t count) {
    expect(count, 2);
    Singles lines(with[0]), exponentials(with[1]);
    if (lines.size() != exponentials.size()) raise_type_error("expected as many exponentials as lines");
    float *values = lines.data(), *bent = exponentials.data();
    for (size_t at = 0; at < lines.size(); at++) {
        float value = values[at], gate = bent[at] + 1.0f, share = 1.0f / gate;
        bent[at] = value / gate;
        values[at] = ((1.0f - share) * value + 1.0f) * share;
    }
    return nothing();
}

// exposure(ages, returned, borders of the age bins, shares, spent out, events out): the seconds that each
// wait spent in each bin, and its return, both times its share
inline PyObject* exposure(Arguments with, Py_ssize_t count) {
    expect(count, 6);
    Array<const double> ages(with[0]);
    Array<const uint8_t> returned(with[1]);
    Array<const double> borders(with[2]);
    GivenSingles shares(with[3]);
    Singles spent(with[4]), events(with[5]);
    size_t waits = ages.size(), bins = borders.size() - 1;
    if (borders.size() < 2 || returned.size() != waits || shares.size() != waits || spent.size() != waits * bins ||
        events.size() != waits * bins)
        raise_type_error("expected an end and a share of each wait, and room for each and each bin");
    for (size_t wait = 0; wait < waits; wait++) {
        double age = ages[wait];
        float share = shares[wait], *seconds = spent.data() + wait * bins, *ended = events.data() + wait * bins;
        for (size_t bin = 0; bin < bins; bin++) {
            double within = std::min(std::max(age - borders[bin], 0.0), borders[bin + 1] - borders[bin]);
            seconds[bin] = (float)within * share;
            ended[bin] = 0.0f;
        }
        if (!returned[wait] || !(age < borders[bins])) continue;
        int64_t bin = std::upper_bound(borders.begin(), borders.end(), age) - borders.begin() - 1;
        if (bin >= 0) ended[bin] = share;
    }
    return nothing();
}

// blame(logarithms of rates in place, rates, spent, events, bins, smooth): the logarithms become the slope
// of the loss by them: rate · seconds spent less returns, and what draws neighbouring bins to each other.
inline PyObject* blame(Arguments with, Py_ssize_t count) {
    expect(count, 6);
    Singles logarithms(with[0]);
    GivenSingles rates(with[1]), spent(with[2]), events(with[3]);
    size_t bins = (size_t)as_integer(with[4]), size = logarithms.size(), each_network = spent.size();
    float smooth = (float)as_double(with[5]);
    if (!bins || !each_network || rates.size() != size || events.size() != each_network || size % each_network ||
        each_network % bins)
        raise_type_error("rates and what was spent do not fit each other");
    std::vector<float> between(bins + 1, 0.0f);  // each bin and the one before it
    float* __restrict rough = between.data();
    for (size_t start = 0, wait = 0; start < size; start += bins, wait = wait + bins == each_network ? 0 : wait + bins) {
        float* __restrict slope = logarithms.data() + start;
        const float *rate = rates.data() + start, *seconds = spent.data() + wait, *ended = events.data() + wait;
        for (size_t bin = 1; bin < bins; bin++) rough[bin] = (slope[bin] - slope[bin - 1]) * smooth;
        for (size_t bin = 0; bin < bins; bin++)
            slope[bin] = rate[bin] * seconds[bin] - ended[bin] + rough[bin] - rough[bin + 1];
    }
    return nothing();
}

// back(slopes in place, factors or None, units, sums out): the slopes are multiplied by the factors; their
// sums over all waits are those by the bases.
inline PyObject* back(Arguments with, Py_ssize_t count) {
    expect(count, 4);
    Singles slopes(with[0]);
    size_t units = (size_t)as_integer(with[2]), size = slopes.size();
    Singles sums(with[3]);
    if (!units || !sums.size() || sums.size() % units || size % sums.size())
        raise_type_error("slopes, sums and units do not fit each other");
    if (with[1] != Py_None) {
        GivenSingles factors(with[1]);
        if (factors.size() != size) raise_type_error("expected a factor for each slope");
        const float* factor = factors.data();
        float* slope = slopes.data();
        for (size_t at = 0; at < size; at++) slope[at] *= factor[at];
    }
    size_t networks = sums.size() / units, rows = size / sums.size();
    for (size_t network = 0; network < networks; network++) {
        float* sum = sums.data() + network * units;
        const float* slope = slopes.data() + network * rows * units;
        std::copy(slope, slope + units, sum);
        for (size_t row = 1; row < rows; row++)
            for (size_t unit = 0; unit < units; unit++) sum[unit] += slope[row * units + unit];
    }
    return nothing();
}

// moments(slopes, means in place, squares in place, how far squares are warm, out): Adam's moments, which
// forget; out come the squares, warmed up, whose roots `descend` asks for.
inline PyObject* moments(Arguments with, Py_ssize_t count) {
    expect(count, 5);
    GivenSingles slopes(with[0]);
    Singles means(with[1]), squares(with[2]);
    float warm = (float)as_double(with[3]);
    Singles out(with[4]);
    size_t n = slopes.size();
    if (means.size() != n || squares.size() != n || out.size() != n)
        raise_type_error("expected two moments of each slope, and room");
    const float* slope = slopes.data();
    float *mean = means.data(), *square = squares.data(), *warmed = out.data();
    for (size_t at = 0; at < n; at++) {
        mean[at] += 0.1f * (slope[at] - mean[at]);
        square[at] += 0.001f * (slope[at] * slope[at] - square[at]);
        warmed[at] = square[at] / warm;
    }
    return nothing();
}

// descend(weights in place, means, roots of squares, prior, warm, step, pull): against the slopes, and towards
// the prior
inline PyObject* descend(Arguments with, Py_ssize_t count) {
    expect(count, 7);
    Singles weights(with[0]);
    GivenSingles means(with[1]), roots(with[2]), prior(with[3]);
    float warm = (float)as_double(with[4]), step = (float)as_double(with[5]), pull = (float)as_double(with[6]);
    size_t n = weights.size();
    if (means.size() != n || roots.size() != n || prior.size() != n)
        raise_type_error("expected a mean, a root and a prior of each weight");
    const float *mean = means.data(), *root = roots.data(), *start = prior.data();
    float* weight = weights.data();
    for (size_t at = 0; at < n; at++) {
        float value = weight[at] - step * (mean[at] / warm) / (root[at] + 1e-8f);
        weight[at] = value - pull * (value - start[at]);
    }
    return nothing();
}

}  // namespace networks
