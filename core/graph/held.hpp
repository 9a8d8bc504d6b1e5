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

// rows(pages, bits, some of them, out) -> how many rows, ascending, have one of some bits; there is room for
// all rows of the pages that have some. Pages without any bit are forgotten.
inline PyObject* rows(Arguments with, Py_ssize_t count) {
    expect(count, 4);
    Array<uint8_t> pages(with[0]);
    Array<const uint8_t> bits(with[1]);
    int64_t asked = as_integer(with[2]);
    if (asked < 0 || asked > 255) raise_type_error("bits are those of a byte");
    Array<int32_t> out(with[3]);
    size_t room = 0, found = 0;
    for (uint8_t page : pages) room += page ? PAGE : 0;
    if (out.size() < room) raise_type_error("there is no room for all rows");
    constexpr uint64_t EACH = 0x0101010101010101ull;
    const uint64_t wanted = EACH * (uint64_t)asked;
    for (size_t page = 0; page < pages.size(); page++) {
        if (!pages[page]) continue;
        size_t start = page * PAGE, end = std::min(start + PAGE, bits.size());
        uint64_t any = 0;
        for (size_t at = start; at < end; at += 8) {
            uint64_t eight = 0;
            std::memcpy(&eight, bits.data() + at, std::min<size_t>(8, end - at));
            any |= eight;
            eight &= wanted;
            if (!eight) continue;
            eight |= eight >> 4;  // the lowest bit of a byte tells of all of them
            eight |= eight >> 2;
            eight |= eight >> 1;
            eight &= EACH;
            int32_t* to = out.data() + found;
            if (eight == EACH) {  // as mostly: blocks come together
                for (int32_t each = 0; each < 8; each++) to[each] = (int32_t)at + each;
                found += 8;
                continue;
            }
            for (; eight; eight &= eight - 1) out[found++] = (int32_t)at + (__builtin_ctzll(eight) >> 3);
        }
        if (!any) pages[page] = 0;
    }
    return PyLong_FromSize_t(found);
}

}  // namespace held
