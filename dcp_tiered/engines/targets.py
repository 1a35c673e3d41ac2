"""Tensors that are loaded into: where in memory they take their bytes."""

import torch


def is_one_run(tensor: torch.Tensor, dtype: torch.dtype) -> bool:
    """Tell whether a tensor's memory is its row-major values, as they are stored.

    Args:
        tensor: A target, or a part of one, on any device.
        dtype: Of the stored values.
    """
    return (
        tensor.dtype is dtype
        and type(tensor) in (torch.Tensor, torch.nn.Parameter)
        and tensor.is_contiguous()
        and not tensor.is_conj()
        and not tensor.is_neg()
    )


def flat_address(tensor: torch.Tensor, dtype: torch.dtype) -> int | None:
    """Return the address of a tensor that takes its bytes as they are stored.

    Returns:
        None where it does not: on an accelerator, with strides, of another dtype.
    """
    if tensor.device.type == "cpu" and is_one_run(tensor, dtype):
        return tensor.data_ptr()
    return None
