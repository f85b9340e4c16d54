import torch
from torch.nn.functional import binary_cross_entropy_with_logits

import shoal

table = shoal.HashTable(dim=16, optimizer=shoal.Adam(lr=0.01), expire_after="30d")
model = torch.nn.Sequential(shoal.nn.HashEmbeddingBag(table, combiner="mean"), torch.nn.Linear(16, 1))
dense = torch.optim.Adam(model.parameters(), lr=0.01)
for step in range(401):
    ids = torch.randint(5000, (256, 8)) * 982451653  # bags of 8 ids; any int64 is an id, and no two share a row
    clicked = (ids % 3 == 0).sum(1, keepdim=True) > 2
    loss = binary_cross_entropy_with_logits(model(ids), clicked.float())
    dense.zero_grad(), loss.backward(), dense.step()  # backward also updates the rows
    if step % 100 == 0:
        print(f"step {step}: loss {loss.item():.3f}, {len(table)} rows")
