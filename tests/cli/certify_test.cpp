#include <nlohmann/json.hpp>
#include <pugixml.hpp>

#include <cmath>
#include <iterator>
#include <map>
#include <set>

#include "tests/cli/cli.hpp"

// `hae certify` as a user runs it.

namespace hae::testing {
namespace {

using nlohmann::json;
using ::testing::HasSubstr;

class Certify : public Cli {
 protected:
  /// Certifies, and reads what was written.
  json certify(const std::string& arguments, int code = 0) {
    const Outcome outcome = hae("certify " + arguments + " --json c.json");
    EXPECT_EQ(outcome.code, code) << outcome.err;
    out_ = outcome.out;
    err_ = outcome.err;
    return json::parse(read(folder_ / "c.json"));
  }

  /// Claims by id.
  static std::map<std::string, json> claims(const json& result) {
    std::map<std::string, json> by_id;
    for (const json& claim : result["claims"]) {
      by_id[claim["id"]] = claim;
    }
    return by_id;
  }

  std::string out_;
  std::string err_;
};

TEST_F(Certify, SaysYesAboveTheMeasuredLossAndNoBelow) {
  make_trace("t.h5", "--sequences 2");
  const std::string arguments = "t.h5 --policy hae:r=0.02,alpha=0.9 --epsilon ";
  const json result = certify(arguments + "0.999");
  const double measured = result["loss"]["measured"];
  EXPECT_GT(measured, 0.0);
  // The loss is the mean of the decode rows' missed mass, as compare reports it.
  const Outcome compared = hae("compare t.h5 --policy hae:r=0.02,alpha=0.9 --no-optimal --json r.json");
  EXPECT_EQ(compared.code, 0) << compared.err;
  double largest = 0.0;
  const json runs = json::parse(read(folder_ / "r.json"))["runs"];
  for (std::size_t i = 0; i < runs.size(); ++i) {
    const double mean = runs[i]["decode"]["missed_mass"]["mean"];
    EXPECT_EQ(result["loss"]["sequences"][i]["loss"], mean);
    largest = std::max(largest, mean);
  }
  EXPECT_EQ(measured, largest);
  // Equal is within.
  certify(fmt::format("{}{}", arguments, measured));
  certify(fmt::format("{}{}", arguments, std::nextafter(measured, 0.0)), 1);
  EXPECT_THAT(err_, HasSubstr("largest mean missed mass of a sequence is"));
  EXPECT_EQ(std::ranges::count(err_, '\n'), 1);
}

TEST_F(Certify, EveryClaimHasALineAndProvedOnesHold) {
  make_trace("t.h5", "--sequences 3");
  const json result = certify("t.h5 --policy hae:r=0.02,alpha=0.9,budget=30,bin=4 --epsilon 1");
  EXPECT_EQ(result["schema"], "hae.certify/1");
  const std::map<std::string, json> by_id = claims(result);
  EXPECT_EQ(by_id.size(), result["claims"].size());
  for (const auto& [id, claim] : by_id) {
    EXPECT_THAT(out_, HasSubstr(id + "  " + claim["title"].get<std::string>()));
    EXPECT_EQ(claim["applies"] == false, claim["unmet"].is_string()) << id;
    if (claim["status"] == "proved") {
      EXPECT_NE(claim["verdict"], "fails") << id;
      EXPECT_FALSE(claim["proofs"].empty()) << id;
    }
    if (claim["applies"] == true) {
      EXPECT_GT(claim["cases"], 0) << id;
    }
  }
  for (const char* id : {"R1", "R2", "R3", "DAP.columns", "DAP.rows", "G1.marks", "G1.subset", "G1.mass",
                         "ROW.variation", "ROW.kl", "ROW.output", "ROW.diameter"}) {
    EXPECT_EQ(by_id.at(id)["verdict"], "holds") << id << ": " << by_id.at(id).dump();
  }
  EXPECT_EQ(by_id.at("MASS.guarantee")["unmet"], "the policy prunes by thresholds");
  EXPECT_EQ(by_id.at("G2.subset")["verdict"], "holds");  // no eviction changes a score
  // The prompt exceeds the budget, and greedy with a larger one cuts less of it.
  EXPECT_EQ(by_id.at("G2.mass")["unmet"], "the runs evict different tokens in the prefill");
  // Refuted claims that apply may fail; that is no failure of the certificate.
  EXPECT_EQ(by_id.at("C2.1")["status"], "refuted");
}

TEST_F(Certify, WhichClaimsApplyFollowsThePolicy) {
  make_trace("t.h5");
  std::map<std::string, json> by_id =
      claims(certify("t.h5 --policy hae:dap=mass,eps=0.2,ddes=none --epsilon 1"));
  EXPECT_EQ(by_id.at("MASS.guarantee")["verdict"], "holds");
  EXPECT_EQ(by_id.at("MASS.optimal")["verdict"], "holds");
  EXPECT_EQ(by_id.at("DAP.rows")["unmet"], "the policy prunes by mass");
  EXPECT_EQ(by_id.at("G1.marks")["unmet"], "the policy does not mark tokens for a recycle bin");

  by_id = claims(certify("t.h5 --policy hae:dap=mass,eps=0.2,alpha=0.9,bin=3 --epsilon 1"));
  EXPECT_EQ(by_id.at("MASS.guarantee")["verdict"], "holds");
  EXPECT_EQ(by_id.at("MASS.optimal")["unmet"], "scope=image, alpha or max_evicted spare more tokens");

  by_id = claims(certify("t.h5 --policy tova:budget=20 --epsilon 1"));
  EXPECT_EQ(by_id.at("DAP.columns")["unmet"], "the policy does not prune");
  EXPECT_EQ(by_id.at("R3")["verdict"], "holds");
  EXPECT_EQ(by_id.at("ROW.kl")["verdict"], "holds");

  by_id = claims(certify("t.h5 --policy full --epsilon 0.001"));
  EXPECT_EQ(by_id.at("R1")["unmet"], "nothing was evicted");
  EXPECT_EQ(by_id.at("ROW.one-token")["applies"], false);
}

TEST_F(Certify, TheEnvelopeIsFittedOnHalfOfTheGroupsAndTestedOnTheRest) {
  make_trace("t.h5", "--sequences 5");
  const json result = certify("t.h5 --policy greedy:budget=20 --epsilon 1");
  ASSERT_EQ(result["decay"]["layers"].size(), 2u);
  const json& all = result["decay"]["all_layers"];
  EXPECT_EQ(all["tested"]["groups"], 2);  // groups 1 and 3 of 0 to 4
  EXPECT_GE(all["envelope"]["future_loss_of_one"], all["fitted"]["future_loss_of_one"]);
  const json& tested = all["tested"];
  EXPECT_LE(tested["interval95"][0], tested["share"]);
  EXPECT_GE(tested["interval95"][1], tested["share"]);
  EXPECT_EQ(result["decay"]["layers"][0]["evictions"], result["decay"]["layers"][1]["evictions"]);
}

TEST_F(Certify, OneGroupHasNothingToTestOn) {
  make_trace("t.h5");
  const json result = certify("t.h5 --policy greedy:budget=20 --epsilon 1");
  EXPECT_TRUE(result["decay"]["all_layers"]["tested"].is_null());
  EXPECT_TRUE(result["loss"]["conformal"]["bound"].is_null());
  EXPECT_THAT(out_, HasSubstr("no bound: 1 groups, at least 9 are needed for probability 0.9"));
}

TEST_F(Certify, TheConformalBoundIsAnOrderStatisticOfTheGroups) {
  make_trace("t.h5", "--sequences 9");
  const json result = certify("t.h5 --policy greedy:budget=20 --epsilon 1");
  EXPECT_EQ(result["loss"]["conformal"]["bound"], result["loss"]["measured"]);  // ⌈10 · 0.9⌉ = 9, the largest
  const json half = certify("t.h5 --policy greedy:budget=20 --epsilon 1 --delta 0.5");
  std::multiset<double> losses;
  for (const json& sequence : half["loss"]["sequences"]) {
    losses.insert(sequence["loss"].get<double>());
  }
  EXPECT_EQ(half["loss"]["conformal"]["bound"], *std::next(losses.begin(), 4));  // ⌈10 · 0.5⌉ = 5th
}

TEST_F(Certify, WritesJUnit) {
  make_trace("t.h5");
  const Outcome outcome =
      hae("certify t.h5 --policy hae:r=0.02,alpha=0.9,bin=4 --epsilon 1e-9 --junit c.xml");
  EXPECT_EQ(outcome.code, 1);
  pugi::xml_document document;
  ASSERT_TRUE(document.load_file((folder_ / "c.xml").c_str()));
  const pugi::xml_node suite = document.child("testsuites").child("testsuite");
  EXPECT_STREQ(suite.attribute("name").value(), "hae certify");
  EXPECT_EQ(suite.attribute("failures").as_int(), 1);
  const pugi::xml_node loss = suite.find_child_by_attribute("name", "measured loss within epsilon");
  EXPECT_TRUE(loss.child("failure"));
  const pugi::xml_node claim = suite.find_child_by_attribute("name", "claim G1.mass");
  ASSERT_TRUE(claim);
  EXPECT_FALSE(claim.child("failure"));
}

TEST_F(Certify, BadQuestionsAreUsageErrors) {
  make_trace("t.h5");
  for (const auto& [arguments, what] : std::map<std::string, std::string>{
           {"t.h5 --policy greedy --epsilon 0", "--epsilon is 0"},
           {"t.h5 --policy greedy --epsilon nan", "--epsilon"},
           {"t.h5 --policy greedy --epsilon 1 --delta 1", "--delta is 1"},
           {"t.h5 --policy greedy", "--epsilon is required"},
           {"t.h5 --epsilon 1", "--policy is required"},
           {"t.h5 --policy h2o --epsilon 1", "unknown policy 'h2o'"},
           {"t.h5 --policy lookm:budget=20,recent=2,merge=mean --epsilon 1", "merges tokens"}}) {
    const Outcome outcome = hae("certify " + arguments);
    EXPECT_EQ(outcome.code, 2) << arguments << ": " << outcome.err;
    EXPECT_THAT(outcome.err, HasSubstr(what));
    EXPECT_EQ(std::ranges::count(outcome.err, '\n'), 1) << outcome.err;
  }
}

TEST_F(Certify, AStoredLogCanBeCertified) {
  make_trace("t.h5", "--sequences 2");
  ASSERT_EQ(hae("compare t.h5 --policy hae:r=0.02,alpha=0.9,bin=4 --out kept").code, 0);
  const json logged = certify("t.h5 --policy log:path=kept/runs.h5 --epsilon 1");
  const json run = certify("t.h5 --policy hae:r=0.02,alpha=0.9,bin=4 --epsilon 1");
  EXPECT_EQ(logged["loss"]["measured"], run["loss"]["measured"]);
  EXPECT_EQ(logged["decay"], run["decay"]);
}

TEST_F(Certify, ThreadsChangeNothing) {
  make_trace("t.h5", "--sequences 3");
  json one = certify("t.h5 --policy hae:r=0.02,alpha=0.9,bin=4 --epsilon 1 --threads 1");
  json three = certify("t.h5 --policy hae:r=0.02,alpha=0.9,bin=4 --epsilon 1 --threads 3");
  one.erase("manifest");
  three.erase("manifest");
  EXPECT_EQ(one, three);
}

TEST_F(Certify, WithoutADecodeStepThereIsNoLossToCertify) {
  const Outcome made = hae("synth --kind uniform --out p.h5 --prompt 12 --tokens 12 --image-tokens 4");
  ASSERT_EQ(made.code, 0) << made.err;
  const json result = certify("p.h5 --policy hae:bin=3 --epsilon 1", 1);
  EXPECT_TRUE(result["loss"]["measured"].is_null());
  EXPECT_THAT(err_, HasSubstr("no sequence has a decode row"));
}

}  // namespace
}  // namespace hae::testing
