"""Locks: which addresses a replica need not say again, and which answers are refused."""

import pytest

from slipstream.weight_sync.errors import ProtocolError
from slipstream.weight_sync.layout import Binding
from slipstream.weight_sync.publish.address_book import AddressBook
from slipstream.weight_sync.replica.messages import Bound, addresses_digest

BOTH, ONE = {"v": 16, "w": 32}, {"w": 48}


def bound(addresses: dict[str, int], *, is_said: bool = True) -> Bound:
    return Bound("host:1", addresses_digest(addresses), addresses if is_said else None)


def test_what_was_learnt_need_not_be_said_until_the_replica_is_forgotten() -> None:
    book = AddressBook()
    assert book.known(3) == ()
    fresh = book.check(3, [bound(BOTH), bound(ONE)], [["v", "w"], ["w"]])
    assert fresh == {addresses_digest(BOTH): BOTH, addresses_digest(ONE): ONE}
    book.learn(3, {addresses_digest(BOTH): BOTH})
    book.learn(3, {addresses_digest(ONE): ONE})
    assert book.known(3) == (addresses_digest(BOTH), addresses_digest(ONE)) and book.known(2) == ()
    said = [bound(addresses, is_said=False) for addresses in (BOTH, ONE)]
    assert book.check(3, said, [["v", "w"], ["w"]]) == {}
    assert book.binding(3, "host:2", addresses_digest(ONE)) == Binding("host:2", ONE)
    with pytest.raises(ProtocolError, match=r"replica 2 rank 0 is bound to addresses .* which it never said"):
        book.check(2, said, [["v", "w"], ["w"]])
    book.forget(3)
    assert book.known(3) == ()
    with pytest.raises(ProtocolError, match="never said"):
        book.check(3, said, [["v", "w"], ["w"]])


def test_every_rank_says_an_address_of_each_of_its_parameters() -> None:
    """Also one that is bound as another rank is, of which that was found already."""
    book = AddressBook()
    book.check(0, [bound(ONE)], [["w"]])
    with pytest.raises(ProtocolError, match="replica 0 rank 1 says no address of 2 parameters, the first is u"):
        book.check(0, [bound(ONE), bound(ONE)], [["w"], ["u", "v", "w"]])
    with pytest.raises(ProtocolError, match="replica 1 rank 0 says no address of 1 parameters, the first is v"):
        book.check(1, [bound(ONE)], [["v"]])
    book.forget(0)
    with pytest.raises(ProtocolError, match="rank 0 says no address"):
        book.check(0, [bound(ONE)], [["v"]])
    with pytest.raises(ProtocolError, match="replica 0 has 2 ranks and says where 1 are"):
        book.check(0, [bound(ONE)], [["w"], ["w"]])
    with pytest.raises(ProtocolError, match="rank 0 says other addresses than those of its digest"):
        book.check(0, [Bound("host:1", addresses_digest(BOTH), ONE)], [["w"]])
