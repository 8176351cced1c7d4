"""Training loops that others wrote, unmodified, where addresses stay: they save, load and resume inside a budget of a third
of what they take by themselves, bit for bit as without it."""

import faulthandler
import gc
import logging
import pathlib
import warnings

import pytest
import torch

import reef

DEADLINE_SECONDS = 900  # of one test, on a slow machine
STEPS = 6
SAVED_STEP = 3


@pytest.fixture(autouse=True)
def quiet(monkeypatch):
    monkeypatch.setenv("REEF_ADDRESSES", "stay")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    if reef.addresses_here() != "stay":
        pytest.skip(f"addresses {reef.addresses_here()}")
    faulthandler.dump_traceback_later(DEADLINE_SECONDS, exit=True)
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
    logging.disable(logging.NOTSET)
    faulthandler.cancel_dump_traceback_later()


class Text(torch.utils.data.Dataset):
    def __init__(self, count, seed):
        self.tokens = torch.randint(200, (count, 48), generator=torch.Generator().manual_seed(seed))

    def __len__(self):
        return len(self.tokens)

    def __getitem__(self, i):
        return {"input_ids": self.tokens[i], "labels": self.tokens[i]}


def gpt2():
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes = {"n_positions": 64, "n_embd": 192, "n_layer": 4, "n_head": 4}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(vocab_size=256, resid_pdrop=0.1, **sizes))


def trainer_run(model, folder, resume=None):
    """With transformers' Trainer: accumulation, clipping, evaluation, checkpoints, and the best loaded at the end."""
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    options = transformers.TrainingArguments(
        output_dir=str(folder), max_steps=STEPS, per_device_train_batch_size=8, gradient_accumulation_steps=2, eval_strategy="steps",
        eval_steps=SAVED_STEP, save_steps=SAVED_STEP, logging_steps=1, load_best_model_at_end=True, learning_rate=1e-3,
        lr_scheduler_type="cosine", report_to=[], use_cpu=True, disable_tqdm=True, seed=1,
    )  # fmt: skip
    trainer = transformers.Trainer(model=model, args=options, train_dataset=Text(64, 1), eval_dataset=Text(16, 2))
    trainer.remove_callback(transformers.trainer_callback.PrinterCallback)
    trainer.train(resume_from_checkpoint=resume and str(resume / f"checkpoint-{SAVED_STEP}"))
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def lightning_run(model, folder, resume=None):
    """With Lightning's Trainer and its checkpoints."""
    lightning = pytest.importorskip("lightning.pytorch")
    losses = []

    class Language(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.model = model

        def training_step(self, batch, _):
            loss = self.model(**batch).loss
            losses.append(loss.item())
            return loss

        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters(), lr=1e-3)

    saved = lightning.callbacks.ModelCheckpoint(folder, "{step}", every_n_train_steps=SAVED_STEP, save_top_k=-1)
    lightning.seed_everything(1, verbose=False)
    trainer = lightning.Trainer(
        max_steps=STEPS, accelerator="cpu", logger=False, callbacks=[saved], enable_progress_bar=False,
        enable_model_summary=False, gradient_clip_val=1.0, default_root_dir=folder,
    )  # fmt: skip
    data = torch.utils.data.DataLoader(Text(64, 1), batch_size=16)
    trainer.fit(Language(), data, ckpt_path=resume and str(next(pathlib.Path(resume).glob(f"*step={SAVED_STEP}.ckpt"))))
    return losses


@pytest.mark.parametrize("run", [trainer_run, lightning_run])
def test_it_saves_loads_and_resumes_in_a_third_of_its_peak(run, tmp_path):
    def state(model):
        return {name: value.numpy().tobytes() for name, value in model.state_dict().items()}

    ledger = reef.Ledger()
    base = reef.allocator_live_bytes()
    ledger.reset_peak()
    model = gpt2()
    losses = run(model, tmp_path / "plain")
    peak = ledger.peak().total - base
    want = state(model)
    model = gpt2()
    resumed = run(model, tmp_path / "plain resumed", tmp_path / "plain")
    want_resumed = state(model)

    def check(folder, resume, want_losses, want_state):
        gc.collect()
        model = gpt2()
        with reef.budget(peak // 3, model) as budget:
            assert run(model, tmp_path / folder, resume) == want_losses
            use = budget.use()
            assert use.evictions > 100
            assert use.peak_bytes <= peak // 3
            budget.set_bytes(1 << 40)
            assert state(model) == want_state

    del model
    check("budget", None, losses, want)
    check("budget resumed", tmp_path / "budget", resumed, want_resumed)  # what was written in a budget is whole
