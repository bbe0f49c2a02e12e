"""Well-known models, untrained, under DataParallel and under pmap: equal to the plain model. Optional.

It needs torchvision and transformers, which nothing else here does: pip install torchvision transformers
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import compat
import funcpar as fp

pytestmark = pytest.mark.filterwarnings("default")  # Other people's packages warn.
ROWS, LENGTH = 9, 12
Case = tuple[nn.Module, dict[str, Tensor], Callable[[Any], Tensor]]


def resnet18() -> Case:
    models = pytest.importorskip("torchvision").models
    return (
        models.resnet18(num_classes=10).eval(),
        {"x": torch.randn(ROWS, 3, 64, 64).double()},
        lambda out: out,
    )


def vit_tiny() -> Case:
    models = pytest.importorskip("torchvision").models
    module = models.VisionTransformer(32, 8, 4, 3, 192, 384, num_classes=10).eval()
    nn.init.normal_(module.heads.head.weight, std=0.1)
    return module, {"x": torch.randn(ROWS, 3, 32, 32).double()}, lambda out: out


def bert() -> Case:
    package = pytest.importorskip("transformers")
    config = package.BertConfig(
        vocab_size=100, hidden_size=48, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64,
        hidden_dropout_prob=0, attention_probs_dropout_prob=0,
    )  # fmt: skip
    mask = torch.arange(LENGTH) < torch.randint(4, LENGTH, (ROWS, 1))
    inputs = {"input_ids": torch.randint(100, (ROWS, LENGTH)), "attention_mask": mask.long()}
    return package.BertForSequenceClassification(config), inputs, lambda out: out.logits


def gpt2() -> Case:
    package = pytest.importorskip("transformers")
    config = package.GPT2Config(
        vocab_size=100, n_embd=48, n_layer=2, n_head=4, n_positions=32, bos_token_id=0, eos_token_id=0,
        resid_pdrop=0, embd_pdrop=0, attn_pdrop=0, use_cache=False,
    )  # fmt: skip
    return (
        package.GPT2LMHeadModel(config),
        {"input_ids": torch.randint(100, (ROWS, LENGTH))},
        lambda out: out.logits,
    )


@pytest.mark.parametrize("case", [resnet18, vit_tiny, bert, gpt2])
def test_a_well_known_model_equals_the_plain_one(case):
    module, inputs, pick = case()
    module.double()
    plain = copy.deepcopy(module)
    out, expected = pick(compat.DataParallel(module)(**inputs)), pick(plain(**inputs))
    out.square().mean().backward()
    expected.square().mean().backward()
    apply, params = fp.functionalize(plain)
    _, grads = fp.pmap(fp.value_and_grad(lambda p, inputs: pick(apply(p, **inputs)).square().mean()))(
        params, inputs
    )
    same = {"rtol": 1e-10, "atol": 1e-14}  # Some gradients are zero but for rounding.
    torch.testing.assert_close(out, expected, **same)
    for (name, param), mine in zip(plain.named_parameters(), module.parameters(), strict=True):
        if param.grad is not None:
            torch.testing.assert_close(mine.grad, param.grad, **same)
            torch.testing.assert_close(grads[name], param.grad, **same)
