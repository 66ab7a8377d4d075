// Which rows a program of backward_wide.cu takes, where every PERIOD-th row begins alike: rows r, r + PERIOD, ... are a
// class. Arithmetic on numbers of rows only.
//
// Defined by whoever compiles: PERIOD.
#pragma once

struct Place {
    int program, programs, block;
    int first;  // vector of a row that is the first of this block
};

// Rows of a program that begin alike; the sums of their columns are partial sum number `slot`.
struct Segment {
    int turns, slot;
    long long row, size, start;  // of their class: first row, rows, and place of the first in the order of classes
};

// The rows of a program. Where all begin alike, programs take them in turn. Otherwise each has an equal share of them
// in the order of classes, and of a class the rows in the order in which the programs come to them: programs that are
// together in time are in memory, too, which is worth up to a tenth of the bandwidth.
struct Share {
    long long rows, least, longer;  // `longer` programs have a row more than `least`
    int program, programs;
    long long begin, end, position;  // in the order of classes

    __device__ __forceinline__ Share(long long rows_, const Place &at)
        : rows(rows_), least(rows_ / at.programs), longer(rows_ % at.programs), program(at.program),
          programs(at.programs) {
        begin = position = begin_of(program), end = begin_of(program + 1);
    }
    __device__ __forceinline__ long long begin_of(long long other) const {
        return other * least + (other < longer ? other : longer);
    }
    __device__ __forceinline__ int turns() const { return int(end - begin); }
    __device__ __forceinline__ Segment next() {
        if (PERIOD == 1) {
            position = end;
            return {turns(), program, program, rows, 0};
        }
        const long long size = rows / PERIOD, more = rows % PERIOD;  // `more` classes have a row more
        const bool early = position < more * (size + 1);
        const long long number = early ? position / (size + 1) : (position - more) / size;
        const Segment part{0, program + int(number), number, size + early, number * size + (early ? number : more)};
        const long long until = part.start + part.size < end ? part.start + part.size : end;
        const int turns = int(until - position);
        position = until;
        return {turns, part.slot, part.row, part.size, part.start};
    }
    // The row of a segment that is number `turn` of all rows of the program.
    __device__ __forceinline__ long long row_of(const Segment &part, long long turn) const {
        return PERIOD == 1 ? program + turn * programs : part.row + PERIOD * rank_of(part, turn);
    }
    // How many rows of the class come before: of each program those of earlier turns, and of programs before this one
    // those of the same turn.
    __device__ __forceinline__ long long rank_of(const Segment &part, long long turn) const {
        const long long first = program_at(part.start), last = program_at(part.start + part.size - 1);
        const long long skipped = part.start - begin_of(first);  // by the first, which came from the class before
        if (first == last) return turn - skipped;
        const long long whole_before = program > first ? program - first - 1 : 0;
        const long long whole = last - first - 1;
        const auto within = [](long long count, long long most) { return count < 0 ? 0 : count < most ? count : most; };
        return within(turn + (first < program) - skipped, begin_of(first + 1) - part.start) + whole * turn +
               (whole_before < whole ? whole_before : whole) + within(turn, part.start + part.size - begin_of(last));
    }
    // The program that has the row at a place in the order of classes.
    __device__ __forceinline__ long long program_at(long long place) const {
        return place < longer * (least + 1) ? place / (least + 1) : (place - longer) / least;
    }
};
