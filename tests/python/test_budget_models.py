"""The budget over models that nobody here wrote: from the transformers package, by their configs, random weights."""

import gc

import numpy
import pytest
import torch

import reef

WORDS = 211
TEXT = dict(vocab_size=WORDS, max_position_embeddings=64)
ENDS = dict(pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=1)
SIZES = dict(hidden_size=64, num_hidden_layers=4, num_attention_heads=4, intermediate_size=128)
ENCODER = dict(encoder_layers=3, encoder_attention_heads=4, encoder_ffn_dim=128)
DECODER = dict(decoder_layers=3, decoder_attention_heads=4, decoder_ffn_dim=128)
T5 = dict(ENDS, vocab_size=WORDS, d_model=64, d_kv=16, d_ff=128, num_heads=4)
STAGES = dict(hidden_sizes=[16, 32, 64], depths=[2, 2, 2])
DROPOUT = dict(hidden_dropout_prob=0.1, attention_probs_dropout_prob=0.1)


def words(rows=4, length=32):
    return torch.randint(3, WORDS, (rows, length))


def sentences():
    ids = words()
    return {"input_ids": ids, "labels": ids}


def labelled_sentences():
    return {"input_ids": words(), "labels": torch.randint(2, (4,))}


def images():
    return {"pixel_values": torch.randn(4, 3, 32, 32), "labels": torch.randint(2, (4,))}


def segmented_images():
    return {"pixel_values": torch.randn(4, 3, 32, 32), "labels": torch.randint(2, (4, 32, 32))}


def captioned_images():
    return {"pixel_values": torch.randn(4, 3, 32, 32), "input_ids": words(4, 16), "return_loss": True}


def sounds():
    return {"input_values": torch.randn(2, 2048), "labels": torch.randint(1, WORDS, (2, 10))}


def spectrograms():
    return {"input_features": torch.randn(2, 20, 80), "labels": words(2, 20)}


MODELS = {  # a configuration, and what makes a batch
    "BartForConditionalGeneration": (TEXT | ENDS | ENCODER | DECODER | dict(d_model=64), sentences),
    "BertForMaskedLM": (SIZES | TEXT, sentences),
    "BigBirdForMaskedLM": (SIZES | TEXT | dict(block_size=2, num_random_blocks=1), sentences),
    "BloomForCausalLM": (
        dict(vocab_size=WORDS, hidden_size=64, n_layer=4, n_head=4, hidden_dropout=0.1),
        sentences,
    ),
    "CLIPModel": (
        dict(
            text_config=SIZES | TEXT | ENDS | dict(attention_dropout=0.1),
            vision_config=SIZES | dict(image_size=32, patch_size=8),
            projection_dim=32,
        ),
        captioned_images,
    ),
    "ConvNextForImageClassification": (
        STAGES | dict(num_stages=3, patch_size=2, image_size=32, drop_path_rate=0.1),
        images,
    ),
    "DebertaV2ForSequenceClassification": (
        SIZES | TEXT | dict(relative_attention=True, pos_att_type=["c2p", "p2c"], position_buckets=16),
        labelled_sentences,
    ),
    "DistilBertForSequenceClassification": (
        TEXT | dict(dim=64, n_layers=4, n_heads=4, hidden_dim=128),
        labelled_sentences,
    ),
    "ElectraForSequenceClassification": (SIZES | TEXT | dict(embedding_size=32), labelled_sentences),
    "FNetForSequenceClassification": (SIZES | TEXT, labelled_sentences),  # complex numbers
    "GPT2LMHeadModel": (ENDS | dict(vocab_size=WORDS, n_embd=64, n_layer=4, n_head=4, n_positions=64), sentences),
    "LlamaForCausalLM": (SIZES | TEXT | dict(num_key_value_heads=2, attention_dropout=0.1), sentences),
    "MambaForCausalLM": (dict(vocab_size=WORDS, hidden_size=64, num_hidden_layers=4, state_size=8), sentences),
    "MixtralForCausalLM": (  # which weights are used depends on the data; so it does in Switch
        SIZES | TEXT | dict(num_key_value_heads=2, num_local_experts=4, output_router_logits=True),
        sentences,
    ),
    "OPTForCausalLM": (SIZES | TEXT | ENDS | dict(ffn_dim=128, word_embed_proj_dim=64, dropout=0.1), sentences),
    "ResNetForImageClassification": (STAGES | dict(embedding_size=16, layer_type="basic"), images),
    "SegformerForSemanticSegmentation": (
        STAGES
        | dict(num_encoder_blocks=3, num_attention_heads=[1, 2, 4], sr_ratios=[4, 2, 1], mlp_ratios=[2, 2, 2])
        | dict(patch_sizes=[3, 3, 3], strides=[2, 2, 2], decoder_hidden_size=32),
        segmented_images,
    ),
    "SwinForImageClassification": (
        DROPOUT | dict(image_size=32, patch_size=2, embed_dim=24, depths=[2, 2, 2], num_heads=[2, 4, 8], window_size=4),
        images,
    ),
    "SwitchTransformersForConditionalGeneration": (
        T5
        | dict(num_layers=2, num_decoder_layers=2, num_sparse_encoder_layers=2, num_sparse_decoder_layers=2)
        | dict(num_experts=4),
        sentences,
    ),
    "T5ForConditionalGeneration": (T5 | dict(num_layers=3), sentences),
    "ViTForImageClassification": (SIZES | DROPOUT | dict(image_size=32, patch_size=4), images),
    "Wav2Vec2ForCTC": (
        SIZES
        | dict(vocab_size=WORDS, num_feat_extract_layers=4, mask_time_length=2, mask_time_prob=0.2)
        | dict(conv_dim=[32] * 4, conv_stride=[4, 2, 2, 2], conv_kernel=[8, 3, 3, 3])
        | dict(num_conv_pos_embeddings=8, num_conv_pos_embedding_groups=4),
        sounds,
    ),
    "WhisperForConditionalGeneration": (
        ENDS
        | ENCODER
        | DECODER
        | dict(vocab_size=WORDS, d_model=64, dropout=0.1)
        | dict(num_mel_bins=20, max_source_positions=40, max_target_positions=40),
        spectrograms,
    ),
}


@pytest.fixture(scope="module", autouse=True)
def transformers():
    """Imported by the first test and not when tests are collected: it takes seconds."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_HUB_OFFLINE", "1")
        patch.setenv("TRANSFORMERS_VERBOSITY", "error")
        module = pytest.importorskip("transformers", reason="transformers is not installed")
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        ledger = reef.Ledger()  # bytes are counted from the first one on
        gc.collect()
        gc.freeze()  # else every collection goes through all of transformers
        yield module
        gc.unfreeze()
        torch.set_num_threads(threads)
        del ledger


def bits(tensor):
    return None if tensor is None else tensor.detach().flatten().view(torch.uint8).numpy().tobytes()


class Training:
    """Three steps of a model; every call begins anew and does the same."""

    def __init__(self, transformers, name, way=""):
        self.kind = getattr(transformers, name)
        self.config, self.batch = MODELS[name]
        self.way = way

    def model(self):
        torch.manual_seed(0)
        model = self.kind(self.kind.config_class(**self.config)).train()
        if self.way == "checkpointing":
            model.gradient_checkpointing_enable()
        return model.bfloat16() if self.way == "bfloat16" else model

    def losses(self, model):
        torch.manual_seed(1)
        numpy.random.seed(1)  # draws the masks of Wav2Vec2
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False)
        for _ in range(3):
            optimizer.zero_grad()
            for _ in range(2 if self.way == "accumulation" else 1):
                with torch.autocast("cpu", torch.bfloat16, enabled=self.way == "autocast"):
                    loss = model(**self.batch()).loss
                loss.backward()
                yield bits(loss)
            optimizer.step()

    def plain(self):
        """What it computes, and its natural peak."""
        gc.collect()
        before = reef.allocator_live_bytes()
        model = self.model()
        ledger = reef.Ledger()
        losses = list(self.losses(model))
        peak = ledger.peak().total - before
        return results(model, losses), peak

    def within(self, peak, **options):
        """At a budget of ``peak``, or the least that it says would do: what it computes, what the budget did, and in
        which attempt."""
        gc.collect()
        size = reef.allocator_live_bytes() + peak
        for attempt in range(50):  # the least grows with every operator that is got past
            model = self.model()
            with reef.budget(size, model, **options) as budget:
                ledger = reef.Ledger()
                try:
                    losses = list(self.losses(model))
                except RuntimeError as error:  # BudgetError, or where the operator allocates nothing, its text
                    assert " out of memory." in str(error)
                    losses = None
                assert ledger.peak().total <= size
            assert budget.peak_bytes <= size
            if losses is not None:
                return results(model, losses), budget.use(), attempt
            assert budget.minimum_bytes > size
            size = budget.minimum_bytes
            del model, budget
            gc.collect()
        raise AssertionError("no budget would do")


def results(model, losses):
    return (
        {f"loss {i}": loss for i, loss in enumerate(losses)}
        | {name: bits(tensor) for name, tensor in [*model.named_parameters(), *model.named_buffers()]}
        | {f"gradient of {name}": bits(parameter.grad) for name, parameter in model.named_parameters()}
    )


def assert_same_bits(computed, plain):
    assert [name for name in plain if computed[name] != plain[name]] == []


@pytest.mark.parametrize("name", MODELS)
def test_trains_inside_the_budget_bit_for_bit(transformers, name):
    training = Training(transformers, name)
    plain, peak = training.plain()
    report = f"{name}: natural peak {peak} bytes"
    for part in (2, 3, 4):
        computed, use, attempt = training.within(peak // part)
        assert_same_bits(computed, plain)
        assert use.evictions > 0
        report += f"; 1/{part}: attempt {attempt + 1}, least {use.minimum_bytes}, {use.evictions} evictions"
    print(report)


@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing_enable:FutureWarning")
@pytest.mark.parametrize("way", ["accumulation", "autocast", "bfloat16", "checkpointing", "disk", "on demand"])
@pytest.mark.parametrize("name", ["GPT2LMHeadModel", "MixtralForCausalLM"])
def test_ways_of_training(transformers, name, way, tmp_path):
    training = Training(transformers, name, way)
    plain, peak = training.plain()
    computed, use, _ = training.within(
        peak // 3, spill=tmp_path if way == "disk" else None, prefetch=way != "on demand"
    )
    assert_same_bits(computed, plain)
    assert use.evictions > 0
