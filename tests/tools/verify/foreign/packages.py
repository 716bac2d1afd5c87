"""Trainings by packages of others, to verify where they are installed."""

from torch.optim import AdamW

from tests.tools.verify.foreign.trainers import Plain


class Accelerated(Plain):
    """Training with accelerate, which wraps in DistributedDataParallel; FP32, clipped by its own function."""

    def setup(self, model):
        from accelerate import Accelerator

        self.accelerator = Accelerator(cpu=True, gradient_accumulation_steps=self.accumulation)
        self.module, self.optim = self.accelerator.prepare(model, self.optimizer(model))
        return self.module, self.optim

    def step(self, batches):
        for batch in batches:
            with self.accelerator.accumulate(self.module):
                self.accelerator.backward(self.loss(self.module, batch))
                if self.accelerator.sync_gradients:
                    norm = self.accelerator.clip_grad_norm_(self.module.parameters(), self.clip_grad)
                self.optim.step()
                self.optim.zero_grad()
        return {"grad_norm": float(norm)}


class DeepSpeed(Plain):
    """Training with DeepSpeed's ZeRO on BF16 weights, with FP32 masters that its ranks divide.

    It clips behind every hook.
    """

    stage = 1
    clip_grad = 0.0

    def model(self):
        return super().model().bfloat16().float()  # its masters begin with the weights rounded to BF16

    def optimizer(self, model):
        return AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)

    def setup(self, model):
        import deepspeed

        deepspeed.init_distributed(dist_backend="gloo", auto_mpi_discovery=False)
        settings = {
            "train_micro_batch_size_per_gpu": 16, "gradient_accumulation_steps": self.accumulation,
            "gradient_clipping": 0.0, "bf16": {"enabled": True}, "zero_optimization": {"stage": self.stage},
            "zero_allow_untested_optimizer": True,
        }  # fmt: skip
        self.engine, *_ = deepspeed.initialize(model=model, optimizer=self.optimizer(model), config=settings)
        self.module = self.engine.module
        return self.module, self.engine.optimizer.optimizer

    def step(self, batches):
        from deepspeed.utils import safe_get_full_grad

        for batch in batches:
            self.engine.backward(self.loss(self.engine, batch))
            if self.engine.is_gradient_accumulation_boundary():  # the gradient is gone when its optimizer steps
                named = self.module.named_parameters()
                self.grads = {name: safe_get_full_grad(param).cpu() for name, param in named}
            self.engine.step()

    def weights(self, module, optimizer):
        from deepspeed.utils import safe_get_full_fp32_param

        return {name: safe_get_full_fp32_param(param).cpu() for name, param in module.named_parameters()}

    def gradients(self, module, optimizer):
        return self.grads

    def groups(self, module, optimizer):  # its groups hold flat parts
        return dict.fromkeys(dict(module.named_parameters()), optimizer.param_groups[0])

    def states(self, module, optimizer):
        from deepspeed.utils import safe_get_full_optimizer_state

        if optimizer.state == {}:  # before the first update
            return {}
        return {
            (state, name): safe_get_full_optimizer_state(param, state)
            for name, param in module.named_parameters() for state in ("exp_avg", "exp_avg_sq")
        }  # fmt: skip


class DeepSpeed2(DeepSpeed):
    stage = 2


class Fabric(Plain):
    """Training with Lightning Fabric: its module holds DistributedDataParallel and the model, its optimizer holds
    torch's.
    """

    def setup(self, model):
        import lightning_fabric
        from lightning_fabric.plugins.environments import TorchElasticEnvironment
        from lightning_fabric.strategies import DDPStrategy

        strategy = DDPStrategy(cluster_environment=TorchElasticEnvironment(), process_group_backend="gloo")
        self.fabric = lightning_fabric.Fabric(accelerator="cpu", devices=self.ranks, strategy=strategy)
        self.fabric.launch()
        self.module, self.optim = self.fabric.setup(model, self.optimizer(model))
        return self.module, self.optim

    def step(self, batches):
        self.optim.zero_grad()
        for number, batch in enumerate(batches):
            with self.fabric.no_backward_sync(self.module, enabled=number < len(batches) - 1):
                self.fabric.backward(self.loss(self.module, batch) / len(batches))
        norm = self.fabric.clip_gradients(self.module, self.optim, max_norm=self.clip_grad)
        self.optim.step()
        return {"grad_norm": float(norm)}
