"""Train on one rank, cell by cell: look at weights, try a learning rate, go back, try another.

Open it in an editor that knows `# %%`, or run it: python docs/examples/notebook.py
"""

# %% Build a model and its engine. To begin anew, run this cell again.
import torch
import torch.nn.functional as F
from torch import nn

import megamix

torch.manual_seed(0)
model = nn.Sequential(nn.Embedding(64, 32), nn.Linear(32, 64))
engine = megamix.ShardedEngine(model, megamix.AdamW(lr=1e-3), megamix.Precision(torch.bfloat16), clip_grad=1.0)


def train(steps: int) -> float:
    """Train some steps; return the last step's loss."""
    for _ in range(steps):
        tokens = torch.randint(64, (128,))
        engine.backward(F.cross_entropy(engine(tokens).float(), (tokens + 1) % 64))
        result = engine.step()
    return result.loss.item()


# %% Train, and save the state.
print(f"after 20 steps    loss {train(20):.3f}")
place = engine.state_dict()

# %% Continue from this state with several learning rates.
for lr in (1e-3, 1e-2, 3e-2):
    engine.load_state_dict(place)
    engine.set_lr(lr)
    print(f"20 more, lr {lr:<5}  loss {train(20):.3f}")

# %% Compare the FP32 masters with the half weights in the module.
weights = engine.full_weights()
rounding = {name: (weights[name] - half.float()).abs().max() for name, half in model.state_dict().items()}
print({name: f"{error:.0e}" for name, error in rounding.items()})

# %% Ask the model.
with torch.no_grad():
    print("after 7 comes", model(torch.tensor([7])).argmax().item())
