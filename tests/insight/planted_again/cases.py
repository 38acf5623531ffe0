"""Steps to explain, each with its arguments, mapping and mesh."""

import equinox as eqx
import jax
import jax.numpy as jnp

import answers
import axonym as axn
import captions
import contrast
import documents
import energy
import experts
import forecaster
import genome
import images
import mixture
import music
import policy
import protein
import reward
import sampler
import segmenter
import server
import tagger
import towers
import translator
import vision
from blocks import start, train


def begun(init, *axes):
    """A model and the state of its optimizer, without values."""
    return eqx.filter_eval_shape(start(lambda key: init(*axes, key=key)), jax.random.key(0))


def made(init, *axes):
    return eqx.filter_eval_shape(lambda key: init(*axes, key=key), jax.random.key(0))


def array(dtype="float32", **sizes):
    return jax.eval_shape(lambda: axn.zeros(sizes, dtype=dtype))


def a_key():
    return jax.eval_shape(lambda: jax.random.key(0))


def case(step, args, mapping, mesh):
    return {"step": step, "args": args, "kwargs": {}, "mapping": mapping, "mesh": axn.make_mesh(mesh)}


def case_01():
    Base, Embed, Layers, Heads, HeadSize, Mlp = axn.make_axes(base=512, embed=2048, layers=16, heads=16, head_size=128, mlp=8192)
    model, state = begun(genome.Genome.init, Base, Embed, Layers, Heads, HeadSize, Mlp)
    bases = array("int32", batch=32, pos=2048)
    mapping = ({"embed": "data"}, {"batch": "data"})
    return case(genome.step, (model, state, bases, bases), mapping, {"data": 8})


def case_02():
    Vocab, Embed, Layers, KVHeads, Group, HeadSize, Mlp = axn.make_axes(
        vocab=128000, embed=4096, layers=24, kv_heads=8, group=4, head_size=128, mlp=14336
    )
    model = made(server.Writer.init, Vocab, Embed, Layers, KVHeads, Group, HeadSize, Mlp)
    Batch, KeyPos = axn.make_axes(batch=64, key_pos=4096)
    cache = jax.eval_shape(lambda: server.empty(Batch, Layers, KVHeads, KeyPos, HeadSize))
    mapping = {"batch": "data", "kv_heads": "model", "mlp": "model", "vocab": "model"}
    return case(server.one_more, (model, cache, array("int32", batch=64), a_key()), mapping, {"data": 2, "model": 4})


def case_03():
    Film, Person, Embed, Width, Shared = axn.make_axes(film=1_000_000, person=4_000_000, embed=128, width=1024, shared=128)
    model, moments = eqx.filter_eval_shape(
        lambda key: towers.begin(key, Film, Person, Embed, Width, Shared), jax.random.key(0)
    )
    batch = (
        array("int32", batch=65536),
        array("int32", batch=65536, history=50),
        array("int32", batch=65536),
        array(batch=65536),
    )
    mapping = ({"embed": "data"}, {"batch": "data"})
    return case(towers.step, (model, moments, *batch), mapping, {"data": 8})


def case_04():
    Pos, Color, Embed, Layers, Heads, HeadSize, Mlp, Label = axn.make_axes(
        pos=576, pixels=768, embed=1024, layers=24, heads=16, head_size=64, mlp=4096, label=1000
    )
    model, state = begun(vision.Vision.init, Pos, Color, Embed, Layers, Heads, HeadSize, Mlp, Label)
    step = train(vision.loss)
    mapping = (
        {"embed": "data", "head_size": "model", "mlp": "model"},
        {"batch": "data", "head_size": "model", "mlp": "model"},
    )
    batch = array("bfloat16", batch=128, pos=576, pixels=768), array("int32", batch=128)
    return case(step, (model, state, *batch), mapping, {"data": 4, "model": 2})


def case_05():
    Vocab, Embed, Layers, Heads, HeadSize, Mlp = axn.make_axes(
        vocab=65536, embed=2048, layers=12, heads=16, head_size=128, mlp=8192
    )
    model, state = begun(translator.Translator.init, Vocab, Embed, Layers, Heads, HeadSize, Mlp)
    tokens = array("int32", batch=64, pos=512)
    spread = {"heads": "model", "mlp": "model", "vocab": "model"}
    mapping = ({"embed": "data"} | spread, {"batch": "data"} | spread)
    return case(train(translator.loss), (model, state, tokens, tokens, tokens), mapping, {"data": 4, "model": 2})


def case_06():
    Vocab, Embed, Layers, Heads, HeadSize, Mlp, Experts = axn.make_axes(
        vocab=32000, embed=2048, layers=8, heads=16, head_size=128, mlp=5632, experts=8
    )
    model, state = begun(experts.Language.init, Vocab, Embed, Layers, Heads, HeadSize, Mlp, Experts)
    tokens = array("int32", batch=32, pos=2048)
    mapping = ({"embed": "data", "experts": "expert"}, {"batch": "data", "experts": "expert"})
    return case(train(experts.loss), (model, state, tokens, tokens), mapping, {"data": 2, "expert": 4})


def case_07():
    Residue, Pair, Hidden, Mlp, Layers, Bin = axn.make_axes(residue=32, pair=128, hidden=128, mlp=512, layers=16, bin=64)
    model, state = begun(protein.Folder.init, Residue, Pair, Hidden, Mlp, Layers, Bin)
    mapping = {"batch": "data", "row": "model"}
    batch = array("int32", batch=8, row=384), array("int32", batch=8, row=384, col=384)
    return case(train(protein.loss), (model, state, *batch), mapping, {"data": 4, "model": 2})


def case_08():
    Vocab, Embed, Layers, KVHeads, Group, HeadSize, Mlp = axn.make_axes(
        vocab=32000, embed=4096, layers=32, kv_heads=8, group=4, head_size=128, mlp=11008
    )
    model = made(server.Writer.init, Vocab, Embed, Layers, KVHeads, Group, HeadSize, Mlp)
    Batch, KeyPos = axn.make_axes(batch=64, key_pos=2048)
    cache = jax.eval_shape(lambda: server.empty(Batch, Layers, KVHeads, KeyPos, HeadSize))
    spread = {"kv_heads": "model", "mlp": "model", "vocab": "model"}
    mapping = ({"embed": "data"} | spread, {"batch": "data"} | spread)
    return case(server.one_more, (model, cache, array("int32", batch=64), a_key()), mapping, {"data": 4, "model": 2})


def case_09():
    Time, Mel, Embed, Layers, Heads, HeadSize, Mlp, Tag = axn.make_axes(
        time=1024, mel=128, embed=1024, layers=24, heads=16, head_size=64, mlp=4096, tag=527
    )
    model, state = begun(tagger.Tagger.init, Time, Mel, Embed, Layers, Heads, HeadSize, Mlp, Tag)
    batch = array(batch=256, time=1024, mel=128), array(batch=256, tag=527)
    mapping = ({"embed": "data"}, {"batch": "data"})
    return case(tagger.step, (model, state, *batch), mapping, {"data": 8})


def case_10():
    Patch, Embed, Layers, Heads, HeadSize, Mlp, Horizon = axn.make_axes(
        patch=32, embed=1280, layers=20, heads=16, head_size=80, mlp=5120, horizon=128
    )
    model, state = begun(energy.Load.init, Patch, Embed, Layers, Heads, HeadSize, Mlp, Horizon)
    batch = array(batch=2048, pos=64, patch=32), array(batch=2048, pos=64, horizon=128)
    mapping = ({"embed": "data"}, {"batch": "data"})
    return case(train(energy.loss), (model, state, *batch), mapping, {"data": 8})


def case_11():
    Vocab, Embed, Layers, Heads, HeadSize, Mlp, Label = axn.make_axes(
        vocab=50304, embed=1024, layers=12, heads=16, head_size=64, mlp=4096, label=64
    )
    model, state = begun(documents.Reader.init, Vocab, Embed, Layers, Heads, HeadSize, Mlp, Label)
    batch = array("int32", batch=4, pos=16384), array("int32", batch=4)
    mapping = ({"embed": "data"}, {"batch": "data", "pos": "context"})
    return case(train(documents.loss), (model, state, *batch), mapping, {"data": 2, "context": 4})


def case_12():
    Vocab, Embed, Layers, Heads, HeadSize, Mlp = axn.make_axes(
        vocab=32000, embed=2048, layers=24, heads=16, head_size=128, mlp=8192
    )
    model, state = begun(reward.Judge.init, Vocab, Embed, Layers, Heads, HeadSize, Mlp)
    answers_ = array("int32", batch=32, pair=2, pos=1024)
    spread = {"heads": "model", "mlp": "model", "vocab": "model"}
    mapping = (spread, {"batch": "data"} | spread)
    return case(train(reward.loss), (model, state, answers_), mapping, {"data": 4, "model": 2})


def case_13():
    Vocab, Words, TextLayers, TextMlp, Latent, Embed, Layers, Heads, HeadSize, Mlp = axn.make_axes(
        vocab=32128, embed_text=2048, layers=24, mlp=5120, latent=16, embed=1152, layers_=28, heads=16, head_size=72, mlp_=4608
    )
    Layers, Mlp = Layers.alias("layers"), Mlp.alias("mlp")
    model = made(sampler.Painter.init, Vocab, Words, TextLayers, TextMlp, Latent, Embed, Layers, Heads, HeadSize, Mlp)
    args = array("int32", batch=32, pos=128), array("bfloat16", batch=32, pos=1024, latent=16), array(steps=50)
    mapping = {"batch": "data", "heads": "model", "mlp": "model", "vocab": "model"}
    return case(sampler.paint, (model, *args), mapping, {"data": 4, "model": 2})


def case_14():
    Vocab, Embed, Layers, Heads, HeadSize, Mlp, Experts = axn.make_axes(
        vocab=32000, embed=2048, layers=8, heads=16, head_size=128, mlp=4096, experts=16
    )
    model, state = begun(experts.Language.init, Vocab, Embed, Layers, Heads, HeadSize, Mlp, Experts)
    tokens = array("int32", batch=32, pos=1024)
    mapping = ({"embed": "data", "experts": "expert"}, {"batch": ("data", "expert"), "experts": "expert"})
    return case(train(experts.loss), (model, state, tokens, tokens), mapping, {"data": 2, "expert": 4})


def case_15():
    Vocab, Embed, Layers, Heads, HeadSize, Mlp = axn.make_axes(
        vocab=32000, embed=1024, layers=12, heads=16, head_size=64, mlp=4096
    )
    model, state = begun(captions.Transcript.init, Vocab, Embed, Layers, Heads, HeadSize, Mlp)
    tokens, spoken = array("int32", batch=16, pos=8192), array("bool", batch=16, pos=8192)
    mapping = ({"embed": "data"}, {"batch": "data", "pos": "context", "key_pos": "context"})
    return case(train(captions.loss), (model, state, tokens, tokens, spoken), mapping, {"data": 2, "context": 4})


def case_16():
    Note, Embed, Layers, Heads, HeadSize, Mlp = axn.make_axes(note=1024, embed=2048, layers=20, heads=16, head_size=128, mlp=8192)
    model, state = eqx.filter_eval_shape(
        lambda key: music.begin(key, Note, Embed, Layers, Heads, HeadSize, Mlp), jax.random.key(0)
    )
    notes = array("int32", batch=32, pos=1024)
    mapping = ({"embed": "data"}, {"batch": "data"})
    return case(music.step, (model, state, notes, notes), mapping, {"data": 8})


def case_17():
    Vocab, Embed, Layers, KVHeads, Group, HeadSize, Mlp = axn.make_axes(
        vocab=128000, embed=2048, layers=16, kv_heads=8, group=4, head_size=64, mlp=8192
    )
    model = made(answers.Writer.init, Vocab, Embed, Layers, KVHeads, Group, HeadSize, Mlp)
    Batch, KeyPos = axn.make_axes(batch=16, key_pos=2048)
    cache = jax.eval_shape(lambda: answers.empty(Batch, Layers, KVHeads, KeyPos, HeadSize))
    mapping = {"batch": "data", "kv_heads": "model", "mlp": "model", "vocab": "model"}
    args = model, cache, array("int32", batch=16, pos=1024), array("int32", batch=16)
    return case(answers.read, args, mapping, {"data": 4, "model": 2})


def case_18():
    Height, Width, Color, Defect = axn.make_axes(height=256, width=256, color=3, defect=40)
    Widths = [axn.Axis(f"w{i}", n) for i, n in enumerate((128, 256, 512, 1024))]
    model, state = begun(images.Inspector.init, (Height, Width), Color, Widths, Defect)
    batch = array("bfloat16", batch=512, color=3, height=256, width=256), array("int32", batch=512)
    return case(train(images.loss), (model, state, *batch), {"batch": "data"}, {"data": 8})


def case_19():
    Features, Hidden = axn.make_axes(features=64, hidden=2048)
    model, state = begun(forecaster.Forecaster.init, Features, Hidden, 3)
    batch = array("bfloat16", batch=512, time=256, features=64), array(batch=512, time=256)
    mapping = ({"hidden": "data"}, {"batch": "data"})
    return case(train(forecaster.loss), (model, state, *batch), mapping, {"data": 8})


def case_20():
    Vocab, Embed, Layers, Heads, HeadSize, Mlp = axn.make_axes(
        vocab=256000, embed=1024, layers=8, heads=16, head_size=64, mlp=4096
    )
    model, state = begun(translator.Translator.init, Vocab, Embed, Layers, Heads, HeadSize, Mlp)
    tokens = array("int32", batch=64, pos=256)
    spread = {"heads": "model", "mlp": "model"}
    mapping = ({"embed": "data"} | spread, {"batch": "data"} | spread)
    return case(train(translator.loss), (model, state, tokens, tokens, tokens), mapping, {"data": 4, "model": 2})


def case_21():
    Vocab, Embed, Layers, Heads, HeadSize, Mlp, Features, Wide, Shared = axn.make_axes(
        vocab=32000, embed=512, layers=6, heads=8, head_size=64, mlp=2048, features=1024, wide=2048, shared=1024
    )
    model, state = begun(contrast.Search.init, Vocab, Embed, Layers, Heads, HeadSize, Mlp, Features, Wide, Shared)
    batch = array("int32", batch=32768, pos=32), array(batch=32768, features=1024)
    return case(train(contrast.loss), (model, state, *batch), {"batch": "data"}, {"data": 8})


def case_22():
    Vocab, Embed, Layers, KVHeads, Group, HeadSize, Mlp = axn.make_axes(
        vocab=64000, embed=4096, layers=24, kv_heads=8, group=4, head_size=128, mlp=11008
    )
    model = made(server.Writer.init, Vocab, Embed, Layers, KVHeads, Group, HeadSize, Mlp)
    Batch, KeyPos = axn.make_axes(batch=64, key_pos=4096)
    cache = jax.eval_shape(lambda: server.empty(Batch, Layers, KVHeads, KeyPos, HeadSize))
    mapping = {"batch": "data", "group": "model", "mlp": "model", "vocab": "model"}
    return case(server.one_more, (model, cache, array("int32", batch=64), a_key()), mapping, {"data": 2, "model": 4})


def case_23():
    Height, Width, Color, Organ = axn.make_axes(height=512, width=512, color=4, organ=16)
    Widths = [axn.Axis(f"f{i}", n) for i, n in enumerate((64, 128, 256))]
    model, state = begun(segmenter.Segmenter.init, (Height, Width), Color, Widths, Organ)
    batch = array("bfloat16", batch=16, color=4, height=512, width=512), array("int32", batch=16, height=512, width=512)
    stored = ("mf0", "mf1", "mf2", "muf1", "mtop", "vf0", "vf1")
    mapping = (dict.fromkeys(stored, "data") | {"height": None}, {"batch": "data", "height": "model"})
    return case(train(segmenter.loss), (model, state, *batch), mapping, {"data": 4, "model": 2})


def case_24():
    Vocab, Embed, Layers, Heads, HeadSize, Mlp = axn.make_axes(
        vocab=32000, embed=2048, layers=20, heads=16, head_size=128, mlp=8192
    )
    model, state = begun(reward.Judge.init, Vocab, Embed, Layers, Heads, HeadSize, Mlp)
    answers_ = array("int32", batch=32, pair=2, pos=1024)
    return case(train(reward.loss), (model, state, answers_), ({"embed": "data"}, {"batch": "data"}), {"data": 8})


def case_25():
    Vocab, Embed, Layers, Heads, HeadSize, Expert, Mlp = axn.make_axes(
        vocab=49152, embed=1536, layers=12, heads=12, head_size=128, expert=16, mlp=2048
    )
    model, state = begun(mixture.Coder.init, Vocab, Embed, Layers, Heads, HeadSize, Expert, Mlp)
    tokens = array("int32", batch=32, pos=1024)
    spread = {"heads": "model", "expert": "model", "vocab": "model"}
    mapping = ({"embed": "data"} | spread, {"batch": "data"} | spread)
    return case(train(mixture.loss), (model, state, tokens, tokens), mapping, {"data": 4, "model": 2})


def case_26():
    Vocab, Embed, Layers, Heads, HeadSize, Mlp, Action = axn.make_axes(
        vocab=32000, embed=1536, layers=24, heads=16, head_size=96, mlp=6144, action=512
    )
    model, state = begun(policy.Agent.init, Vocab, Embed, Layers, Heads, HeadSize, Mlp, Action)
    tokens, before = array("int32", batch=64, pos=1024), array(batch=64, pos=1024)
    spread = {"heads": "model", "mlp": "model", "vocab": "model"}
    mapping = ({"embed": "data"} | spread, {"batch": "data"} | spread)
    return case(train(policy.loss), (model, state, tokens, tokens, before, before), mapping, {"data": 4, "model": 2})
