// Which rows an engine holds, by its tier bits: pages of rows, of which some are known to have a bit.
#pragma once
#include "arrays.hpp"

#include <algorithm>

namespace held {

constexpr size_t PAGE = 64;  // rows, as in graph/tables/held_rows.py: a line of the processor's cache

// note(pages, rows): that pages have some of these rows
inline PyObject* note(Arguments with, Py_ssize_t count) {
    expect(count, 2);
    Array<uint8_t> pages(with[0]);
    Array<const int32_t> rows(with[1]);
    for (int32_t row : rows) {
        if (row < 0 || (size_t)row / PAGE >= pages.size()) raise_type_error("a row is of none of the pages");
        pages[(size_t)row / PAGE] = 1;
    }
    return nothing();
}

// rows(pages, bits, some of them, out or None) -> how many rows, ascending, have one of some bits; pages
// without any bit are forgotten.
inline PyObject* rows(Arguments with, Py_ssize_t count) {
    expect(count, 4);
    Array<uint8_t> pages(with[0]);
    Array<const uint8_t> bits(with[1]);
    int64_t asked = as_integer(with[2]);
    if (asked < 0 || asked > 255) raise_type_error("bits are those of a byte");
    size_t found = 0;
    const uint64_t all = 0x0101010101010101ull * (uint64_t)asked;
    auto eight_of = [&](size_t start, size_t end) {
        uint64_t eight = 0;
        std::memcpy(&eight, bits.data() + start, std::min<size_t>(8, end - start));
        return eight;
    };
    auto each_page = [&](auto&& look) {
        for (size_t page = 0; page < pages.size(); page++) {
            if (!pages[page]) continue;
            size_t start = page * PAGE, end = std::min(start + PAGE, bits.size());
            uint64_t any = 0;
            for (size_t at = start; at < end; at += 8) {
                uint64_t eight = eight_of(at, end);
                any |= eight;
                if (eight & all) look(at, std::min(at + 8, end), eight & all);
            }
            if (!any) pages[page] = 0;
        }
    };
    if (with[3] == Py_None) {
        each_page([&](size_t, size_t, uint64_t eight) {
            eight |= eight >> 4;  // a byte is one or zero
            eight |= eight >> 2;
            eight |= eight >> 1;
            found += ((eight & 0x0101010101010101ull) * 0x0101010101010101ull) >> 56;
        });
        return PyLong_FromSize_t(found);
    }
    Array<int32_t> out(with[3]);
    bool fits = true;
    each_page([&](size_t start, size_t end, uint64_t) {
        if (found + 8 > out.size()) {
            fits = false;
            return;
        }
        for (size_t at = start; at < end; at++) {
            out[found] = (int32_t)at;
            found += (bits[at] & asked) != 0;
        }
    });
    if (!fits) raise_type_error("there is no room for all rows");
    return PyLong_FromSize_t(found);
}

}  // namespace held
