"""How the bundled pair is trained: corpus, models, training loop, distillation, head, report; the stages use them."""
