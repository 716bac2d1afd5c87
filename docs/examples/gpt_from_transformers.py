"""Train a small Llama of transformers from random weights on a sentence, and save it as a transformers folder.

python docs/examples/gpt_from_transformers.py
"""

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import megamix

STEPS, BATCH_SIZE, LENGTH = 60, 8, 32

device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
text = torch.tensor([*b"to be, or not to be, that is the question. " * 20], device=device)
torch.manual_seed(0)
config = LlamaConfig(
    vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, pad_token_id=0
)
model = LlamaForCausalLM(config).to(device)
engine = megamix.ShardedEngine(
    model,
    megamix.AdamW(lr=4e-3),
    megamix.Precision(torch.bfloat16),
    megamix.Sharding(units=[*model.model.layers]),  # the blocks: their weights are gathered while forward runs
    clip_grad=1.0,
)

for step in range(STEPS):
    starts = torch.randint(len(text) - LENGTH, (BATCH_SIZE, 1), device=device)
    tokens = text[starts + torch.arange(LENGTH, device=device)]
    engine.backward(engine(tokens, labels=tokens).loss)
    result = engine.step()
    if step % 20 == 0 or step == STEPS - 1:
        print(f"step {step:2}  loss {result.loss:.3f}  grad norm {result.grad_norm:.2f}")

model.eval()
prompt = torch.tensor([[*b"to be, "]], device=device)
written = model.generate(prompt, max_new_tokens=36, do_sample=False)
print(bytes(written[0].tolist()).decode())
# Saves FP32 masters; LlamaForCausalLM.from_pretrained("gpt", dtype=torch.float32) loads them in FP32.
model.save_pretrained("gpt", state_dict=engine.full_weights())
