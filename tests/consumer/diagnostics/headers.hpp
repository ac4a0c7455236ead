// SPDX-License-Identifier: Apache-2.0
// The includes of main.cpp and calls.cpp.
#include <heed/attention.hpp>
#include <heed/check/op_check.hpp>
#include <heed/engine/hvp.hpp>
#include <heed/explain.hpp>
#include <heed/mask/visible.hpp>
#include <heed/measure/weights.hpp>
#include <heed/mpi/any_communicator.hpp>
#include <heed/mpi/attention.hpp>
#include <heed/partial.hpp>
#include <heed/plug/own_score.hpp>
#include <heed/plug/row_formula.hpp>
#include <heed/plug/streaming.hpp>
#include <heed/reference/reference.hpp>
