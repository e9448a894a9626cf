"""A recorded step does what the step does, call by call."""

import pytest
import torch

from alphastomics.diffusion_model.cuda_graph import WARM_UP, RecordingError, recorded


def test_on_a_cpu_the_step_is_the_step():
    def step() -> None:
        """Do nothing."""

    assert recorded(step, torch.device("cpu")) is step


def fitted(calls: int, *, graph: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Fit a line on the GPU with a learning rate that changes; return weight and random numbers."""
    torch.manual_seed(0)
    inputs = torch.linspace(-1, 1, 64, device="cuda")[:, None]
    weight = torch.nn.Parameter(torch.zeros(1, 1, device="cuda"))
    rate = torch.tensor(0.1, device="cuda")
    optimizer = torch.optim.AdamW([weight], rate, fused=True, capturable=True)
    drawn = torch.zeros(8, device="cuda")
    history = []

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        (inputs @ weight - 3 * inputs).square().mean().backward()
        optimizer.step()
        drawn.copy_(torch.rand(8, device="cuda"))

    update = recorded(step, torch.device("cuda")) if graph else step
    for number in range(calls):
        update()
        rate.fill_(0.1 / (number + 1))
        history.append(drawn.clone())
    return weight.detach(), torch.stack(history)


@pytest.mark.gpu
@pytest.mark.parametrize("calls", [1, WARM_UP, WARM_UP + 1, 40])
def test_a_graph_does_the_same_updates(calls: int):
    (weight, numbers), (expected, _) = fitted(calls, graph=True), fitted(calls, graph=False)
    torch.testing.assert_close(weight, expected)
    # Every call draws anew, and the same under the same seed.
    assert len(numbers.unique(dim=0)) == calls
    assert torch.equal(numbers, fitted(calls, graph=True)[1])


@pytest.mark.gpu
def test_a_step_that_waits_for_the_gpu_is_refused_and_not_done():
    total = torch.zeros((), device="cuda")
    update = recorded(lambda: total.add_(float(total) + 1), torch.device("cuda"))
    for _ in range(WARM_UP):
        update()
    with pytest.raises(RecordingError):
        update()
    assert float(total) == 2**WARM_UP - 1
