"""What `native/decoder.cpp` is called with: the same structures in the same order."""

import ctypes

from torch import Tensor

from fledge.ops.native_product import CMatrix, NativeMatrix
from fledge.ops.norms import Norm
from fledge.ops.paged_rows import FrontierRows, PagedRows, TreeRows

_pointer, _number = ctypes.c_void_p, ctypes.c_int64


class CNorm(ctypes.Structure):
    _fields_ = (("weight", _pointer), ("eps", ctypes.c_float), ("is_one_plus", ctypes.c_int32))


class CHeads(ctypes.Structure):
    _fields_ = (
        ("num_heads", _number),
        ("num_kv_heads", _number),
        ("size", _number),
        ("scale", ctypes.c_float),
        ("soft_cap", ctypes.c_float),
    )


class CView(ctypes.Structure):
    _fields_ = (
        ("table", _pointer),
        ("table_rows", _pointer),
        ("table_stride", _number),
        ("block_size", _number),
        ("window", _number),
    )


class CRows(ctypes.Structure):
    _fields_ = (
        ("num_rows", _number),
        ("num_requests", _number),
        ("positions", _pointer),
        ("starts", _pointer),
        ("counts", _pointer),
        ("context", _pointer),
        ("chain", _pointer),
        ("first", _pointer),
        ("seen", _pointer),
        ("seen_rows", _number),
        ("seen_columns", _number),
        ("width", _number),
        ("first_number", _number),
    )


class CLayer(ctypes.Structure):
    _fields_ = (
        ("qkv", CMatrix),
        ("out", CMatrix),
        ("gate_up", CMatrix),
        ("down", CMatrix),
        ("before_attention", CNorm),
        ("after_attention", CNorm),
        ("before_mlp", CNorm),
        ("after_mlp", CNorm),
        ("head_norm", CNorm),
        ("query_width", CNorm),
        ("key_width", CNorm),
        ("heads", CHeads),
        ("rotation", _pointer),
        ("keys", _pointer),
        ("values", _pointer),
        ("view", ctypes.c_int32),
        ("activation", ctypes.c_int32),
        ("tap", _number),
    )


class CDecoder(ctypes.Structure):
    _fields_ = (
        ("layers", ctypes.POINTER(CLayer)),
        ("num_layers", _number),
        ("hidden_size", _number),
        ("final_norm", CNorm),
        ("to_logits", CMatrix),
    )


class CPass(ctypes.Structure):
    _fields_ = (
        ("rows", CRows),
        ("views", ctypes.POINTER(CView)),
        ("num_views", _number),
        ("tokens", _pointer),
        ("embedding", _pointer),
        ("stream", _pointer),
        ("features", _pointer),
        ("features_stride", _number),
        ("final", _pointer),
        ("logit_rows", _pointer),
        ("num_logit_rows", _number),
        ("logits", _pointer),
        ("best_tokens", _pointer),
    )


class CStep(ctypes.Structure):
    _fields_ = (
        ("rows", CRows),
        ("view", CView),
        ("tokens", _pointer),
        ("embedding", _pointer),
        ("hidden", _pointer),
        ("hidden_rows", _pointer),
        ("embedding_norm", CNorm),
        ("hidden_norm", CNorm),
        ("keeps_normed", _number),
        ("output_rows", _pointer),
        ("num_outputs", _number),
        ("stream", _pointer),
        ("normed", _pointer),
    )


class CChain(ctypes.Structure):
    _fields_ = (
        ("rows", CRows),
        ("view", CView),
        ("tokens", _pointer),
        ("embedding", _pointer),
        ("embedding_norm", CNorm),
        ("hidden_norm", CNorm),
        ("keeps_normed", _number),
        ("feeds_normed", _number),
        ("fuse", CMatrix),
        ("features", _pointer),
        ("num_features", _number),
        ("feature_slots", _pointer),
        ("fused", _pointer),
        ("to_logits", CMatrix),
        ("unrounded", _pointer),
        ("to_target", _pointer),
        ("depth", _number),
        ("least", ctypes.c_float),
        ("copied", _pointer),
        ("limits", _pointer),
        ("draws", _pointer),
        ("num_candidates", _number),
        ("dropped", ctypes.c_double),
        ("scale", ctypes.c_double),
        ("drafts", _pointer),
        ("probabilities", _pointer),
        ("num_levels", _pointer),
    )


class CWalk(ctypes.Structure):
    _fields_ = (
        ("logits", _pointer),
        ("num_columns", _number),
        ("num_requests", _number),
        ("starts", _pointer),
        ("counts", _pointer),
        ("tokens", _pointer),
        ("draws", _pointer),
        ("said", _pointer),
    )


class Kept:
    """Keeps what pointers point to for as long as they are used."""

    def __init__(self) -> None:
        self._tensors: list[object] = []

    def pointer(self, tensor: Tensor | None) -> int | None:
        if tensor is None:
            return None
        tensor = tensor.contiguous()
        self._tensors.append(tensor)
        return tensor.data_ptr()

    def matrix(self, matrix: NativeMatrix) -> CMatrix:
        self._tensors.append(matrix)
        return matrix.c

    def norm(self, norm: Norm | None) -> CNorm:
        if norm is None:
            return CNorm(None, 0.0, 0)
        return CNorm(self.pointer(norm.weight_D), norm.eps, int(norm.kind == "one_plus"))


def describe_view(paged: PagedRows, window: int | None, kept: Kept) -> CView:
    table_BP = paged.table_BP
    return CView(kept.pointer(table_BP), None, table_BP.shape[1], paged.block_size, window or 0)


def describe_rows(paged: PagedRows, kept: Kept) -> CRows:
    rows, seen = paged.rows, paged.seen_BRS
    lengths: list[Tensor | None]
    seen_shape = (0, 0) if seen is None else tuple(seen.shape[1:])
    if isinstance(rows, TreeRows):
        lengths = [rows.starts_B, rows.num_rows_B, paged.context_B, rows.chain_B, rows.first_B]
        frontier = (0, 0)
    else:
        assert isinstance(rows, FrontierRows)
        lengths = [None, None, paged.context_B, None, None]
        frontier = (rows.width, rows.first_number)
    return CRows(
        paged.num_rows,
        paged.num_requests,
        kept.pointer(paged.positions_T),
        *(kept.pointer(one) for one in lengths),
        kept.pointer(seen),
        *seen_shape,
        *frontier,
    )
