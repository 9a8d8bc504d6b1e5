// Arrays that Python owns, seen by C++ through the buffer protocol: no header of numpy is needed.
#pragma once
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <cstdint>
#include <cstring>
#include <new>
#include <type_traits>
#include <vector>

struct Raised {};  // a Python error is set

[[noreturn]] inline void raise_type_error(const char* said) {
    PyErr_SetString(PyExc_TypeError, said);
    throw Raised{};
}

template <class T>
constexpr const char* formats() {
    if constexpr (std::is_same_v<T, double>) return "d";
    if constexpr (std::is_same_v<T, float>) return "f";
    if constexpr (std::is_same_v<T, int8_t>) return "b";
    if constexpr (std::is_same_v<T, uint8_t>) return "B?";
    if constexpr (std::is_same_v<T, uint16_t>) return "H";
    if constexpr (std::is_same_v<T, int32_t>) return "i";
    if constexpr (std::is_same_v<T, uint32_t>) return "I";
    if constexpr (std::is_same_v<T, int64_t>) return "lq";
    if constexpr (std::is_same_v<T, uint64_t>) return "LQ";
    return "";
}

// A one-dimensional array without gaps; `const T` may be read only.
template <class T>
class Array {
public:
    explicit Array(PyObject* owner) {
        int flags = PyBUF_ND | PyBUF_FORMAT | (std::is_const_v<T> ? 0 : PyBUF_WRITABLE);
        if (PyObject_GetBuffer(owner, &view_, flags) < 0) throw Raised{};
        using Plain = std::remove_const_t<T>;
        const char* format = view_.format ? view_.format : "B";
        if (*format == '<' || *format == '=' || *format == '@') format++;
        bool fits = view_.ndim == 1 && view_.itemsize == (Py_ssize_t)sizeof(Plain) && !format[1] &&
                    std::strchr(formats<Plain>(), format[0]);
        if (!fits) {
            PyErr_Format(PyExc_TypeError, "expected a one-dimensional array of '%c', got '%s' in %d dimensions",
                         formats<Plain>()[0], view_.format, view_.ndim);
            PyBuffer_Release(&view_);
            throw Raised{};
        }
    }
    Array(const Array&) = delete;
    Array& operator=(const Array&) = delete;
    ~Array() { PyBuffer_Release(&view_); }

    T* data() const { return static_cast<T*>(view_.buf); }
    T& operator[](size_t at) const { return data()[at]; }
    size_t size() const { return (size_t)view_.shape[0]; }
    T* begin() const { return data(); }
    T* end() const { return data() + size(); }

private:
    Py_buffer view_{};
};

// The interpreter is free for others while one of these lives, if there is much to do: who gives it
// away may wait for it for some milliseconds. No Python object may be touched meanwhile.
class Unlocked {
public:
    explicit Unlocked(size_t values) : state_(values >= MUCH ? PyEval_SaveThread() : nullptr) {}
    ~Unlocked() {
        if (state_) PyEval_RestoreThread(state_);
    }
    Unlocked(const Unlocked&) = delete;

private:
    static constexpr size_t MUCH = 1 << 16;  // chosen: a tenth of a millisecond, or more
    PyThreadState* state_;
};

using Arguments = PyObject* const*;

inline void expect(Py_ssize_t given, Py_ssize_t wanted) {
    if (given != wanted) {
        PyErr_Format(PyExc_TypeError, "expected %zd arguments, got %zd", wanted, given);
        throw Raised{};
    }
}

inline int64_t as_integer(PyObject* number) {
    long long value = PyLong_AsLongLong(number);
    if (value == -1 && PyErr_Occurred()) throw Raised{};
    return value;
}

inline double as_double(PyObject* number) {
    double value = PyFloat_AsDouble(number);
    if (value == -1.0 && PyErr_Occurred()) throw Raised{};
    return value;
}

inline PyObject* nothing() { Py_RETURN_NONE; }

inline PyObject* listed(const std::vector<int64_t>& numbers) {
    PyObject* list = PyList_New((Py_ssize_t)numbers.size());
    if (!list) throw Raised{};
    for (size_t at = 0; at < numbers.size(); at++) {
        PyObject* number = PyLong_FromLongLong(numbers[at]);
        if (!number) {
            Py_DECREF(list);
            throw Raised{};
        }
        PyList_SET_ITEM(list, (Py_ssize_t)at, number);
    }
    return list;
}

// No C++ exception may leave a function that Python calls.
template <PyObject* (*body)(Arguments, Py_ssize_t)>
PyObject* called(PyObject*, Arguments arguments, Py_ssize_t count) {
    try {
        return body(arguments, count);
    } catch (const Raised&) {
        return nullptr;
    } catch (const std::bad_alloc&) {
        return PyErr_NoMemory();
    }
}
